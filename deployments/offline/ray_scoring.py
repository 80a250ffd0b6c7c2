"""What `dpiframe score --engine ray` does: the same job as `file_scoring`, through Ray Data on a cluster.

Tasks read the file's pieces (a CSV or JSON file is one), actors that have loaded the bundle once score them, and this process
writes what they give back, in the order of the input. Bundle and input must lie at the same path on every node. The tasks'
processes need no torch: it is imported where bundles are read.
"""

import logging
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from deployments.offline.score_job import Progress, ScoreJob, ScorePlan, plan_job
from deployments.offline.scored_file import ScoreReport, scored_file
from deployments.private_ray import idle_processes_left_out
from deployments.processes import killed_after
from dpiframe_core.errors import DPIFrameError, InputError
from dpiframe_core.files.row_files import RowFile, iter_chunks, row_groups
from kernels.runtime.cores import usable_cores

# Columns that travel with the rows: number in the file, scores, labels; unknown values of a chunk, told with its first row.
_ROW, _SCORE, _LABEL, _OOV = "__row", "__score_", "__label_", "__oov"
_PIECE_ROWS = 1 << 18  # of a Parquet file that one task reads; more if a row group has more
_BLOCK_BYTES = 16 << 20  # of rows that go to an actor at once; Ray's 128 MiB would leave one file's rows to one actor
_STORE_BYTES = 512 << 20
_READER_CPUS = 0.25  # unlike the actors', which also keeps Ray from reading a file's only piece within the one actor


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the input: row groups of a Parquet file (None: the whole file), and the number of its first row."""

    groups: tuple[int, ...] | None
    first_row: int


class RayScoringError(DPIFrameError):
    """What a worker said of the input, or what became of the cluster."""

    code = "ray_failed"


def score_on_cluster(job: ScoreJob, progress: Progress, workers: int, address: str | None = None) -> ScoreReport:
    """Runs a job on `workers` actors, of one GPU each if its device is cuda.

    Args:
        address: of an existing cluster; without it a private one is started here and stopped, once in a process.

    Raises:
        InputError, BundleError: as `plan_job` and `read_bundle`.
        RayScoringError: a bad row, in the words of `score_file`; or a worker was lost, or no cluster answers.
    """
    from dpiframe_core.bundle.bundle import read_bundle

    job = replace(job, bundle=job.bundle.resolve(), input=job.input.resolve())
    plan = plan_job(job, read_bundle(job.bundle).manifest)
    own = re.compile(f"{_ROW}|{_OOV}|({_SCORE}|{_LABEL})[0-9]+")
    if taken := [name for name in plan.file.columns or () if own.fullmatch(name)]:
        raise InputError(f"{job.input}, columns", taken, "none of these names, which the ray engine uses; --keep others")
    parts = pieces(plan.file)
    with _cluster(address, workers), scored_file(job.out, plan) as out:
        try:
            for table in _scored_blocks(job, plan, parts, workers, address is None):
                scores = np.stack([table[f"{_SCORE}{i}"].to_numpy() for i in range(len(plan.scores))], 1)
                labels = [table[f"{_LABEL}{i}"].to_numpy() for i in range(len(plan.labels))]
                oov = int(table[_OOV].to_numpy().sum())
                out.add(table, scores, np.stack(labels, 1) if labels else None, oov)
                progress(None, out.rows)
        except DPIFrameError:
            raise
        except Exception as error:
            raise _cause(error) from error
    return out.report(job.out)


def pieces(file: RowFile) -> list[Piece]:
    """The parts of a file that tasks may read side by side, each of whole row groups."""
    if not file.is_parquet:
        return [Piece(None, 1)]
    found: list[Piece] = []
    first = row = 1
    groups: list[int] = []
    for group, rows in enumerate(row_groups(file)):
        groups.append(group)
        row += rows
        if row - first >= _PIECE_ROWS:
            found.append(Piece(tuple(groups), first))
            first, groups = row, []
    if groups and row > first:
        found.append(Piece(tuple(groups), first))
    return found or [Piece(None, 1)]


def _scored_blocks(job: ScoreJob, plan: ScorePlan, parts: list[Piece], workers: int, own: bool) -> Iterator[pa.Table]:
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are told in our words
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.target_max_block_size = _BLOCK_BYTES
    # On one host an actor that was killed would be again, and Ray's core complains on stderr that a restart might fail.
    lasting: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0} if own else {}
    warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")  # and for this there is no other way
    warnings.filterwarnings("ignore", "The minimum number of concurrent actors")  # a small file keeps fewer busy
    read = ray.data.from_items([{"piece": i} for i in range(len(parts))], override_num_blocks=len(parts)).map_batches(
        _read, batch_size=1, batch_format="pyarrow", num_cpus=_READER_CPUS, fn_args=(job, plan, parts)
    )
    scored = read.map_batches(
        _Actor, batch_size=job.chunk_rows, batch_format="pyarrow", compute=ray.data.ActorPoolStrategy(size=workers), num_cpus=1,
        num_gpus=1 if job.device == "cuda" else 0, fn_constructor_args=(job, plan), **lasting,
    )  # fmt: skip
    yield from scored.iter_batches(batch_size=None, batch_format="pyarrow")


def _read(batch: pa.Table, job: ScoreJob, plan: ScorePlan, parts: list[Piece]) -> Iterator[pa.Table]:
    """The rows of one piece, with their numbers."""
    piece = parts[batch["piece"][0].as_py()]
    for chunk in iter_chunks(plan.file, job.chunk_rows, piece.groups, piece.first_row):
        numbers = np.arange(chunk.first_row, chunk.first_row + chunk.table.num_rows)
        yield chunk.table.append_column(_ROW, pa.array(numbers))


class _Actor:
    """Owns one engine on its node for as long as the job lasts."""

    def __init__(self, job: ScoreJob, plan: ScorePlan) -> None:
        from deployments.offline.chunk_scorer import ChunkScorer
        from dpiframe_core.bundle.bundle import read_bundle

        self._plan = plan
        self._scorer = ChunkScorer(job, plan, read_bundle(job.bundle))

    def __call__(self, table: pa.Table) -> pa.Table:
        numbers = table[_ROW].to_numpy()
        done = self._scorer(table, lambda row: int(numbers[row]))
        oov = np.zeros(table.num_rows, np.int32)
        oov[0] = done.oov_count
        columns: dict[str, Any] = {f"{_SCORE}{i}": column for i, column in enumerate(done.scores.T)}
        if done.labels is not None:
            columns |= {f"{_LABEL}{i}": column for i, column in enumerate(done.labels.T)}
        out = table.select(self._plan.kept)
        for name, column in (columns | {_OOV: oov}).items():
            out = out.append_column(name, pa.array(np.ascontiguousarray(column)))
        return out


def _cause(error: Exception) -> RayScoringError:
    """The last error of ours in the traceback, which is all that Ray brings from another process, else its own last line."""
    text = str(error).strip()
    ours = re.findall(r"^dpiframe_core\.errors\.\w+: (.*)$", text, re.MULTILINE)
    last = text.splitlines()[-1] if text else type(error).__name__
    return RayScoringError(ours[-1] if ours else f"ray: got {last!r}, expected every worker to finish")


@contextmanager
def _cluster(address: str | None, workers: int) -> Iterator[None]:
    """The cluster at `address`, or a private one of this host. Its files, ports and processes are its own."""
    state = Path(tempfile.mkdtemp(prefix=f"dpi-{os.getpid()}-", dir="/tmp"))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        (state / "token").touch(0o600)
        (state / "token").write_text(secrets.token_hex(32))
        # Anyone who reaches a Ray port could run code: a token that only this user can read guards them.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(state / "token"))
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is not None:
            try:
                ray.init(address=address, **quiet)
            except Exception as error:
                told = str(error).strip().splitlines()[0]
                raise RayScoringError(f"address: got {address!r} ({told}), expected a Ray cluster to join") from None
        else:
            with idle_processes_left_out():
                ray.init(
                    address="local", num_cpus=max(usable_cores(), workers + 1), include_dashboard=False,
                    object_store_memory=_STORE_BYTES, _node_ip_address="127.0.0.2", _temp_dir=str(state / "ray"), **quiet,
                )  # fmt: skip
        yield
    finally:
        with killed_after(state):
            ray.shutdown()
        shutil.rmtree(state, ignore_errors=True)
