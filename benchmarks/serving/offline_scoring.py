"""Suite `score`: files of rows scored offline, through the whole of `dpiframe score`: read, encode, engine, write.

The model is DCN-V2 over 26 small tables (Criteo Kaggle's sizes, none above 10,000 rows), two cross layers, MLP 64-32; the input
is Parquet of encoded ids, and what the output keeps of it is all. The peer is what a script would do: the same model in eager
PyTorch, a table a field, the same file read and written by the same library in chunks of the same size.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed, check
from benchmarks.systems.systems import golden
from benchmarks.workloads.blocks import drawn_blocks
from benchmarks.workloads.models import workload
from benchmarks.workloads.workload import CRITEO, Form, Workload
from deployments.offline.file_scoring import score_file
from deployments.offline.score_job import ScoreJob
from dpiframe_core.bundle.bundle import write_bundle
from dpiframe_core.bundle.manifest import Provenance
from dpiframe_core.graph.architecture import DCNv2
from kernels.dense.linear import matmul_precision
from kernels.runtime.cores import usable_cores

SIZES = tuple(min(n, 10_000) for n in CRITEO[:26])
MODEL = DCNv2(cross_layers=2, hidden_units=(64, 32))
_DRAWN = 1 << 16  # rows that are drawn; a longer file repeats them
_CHUNK = 8192


def run(
    dims: Sequence[int],
    rows: int,
    device: torch.device,
    failed: Failed,
    *,
    repeats: int,
    seed: int,
    sizes: Sequence[int] = SIZES,
) -> Iterator[Record]:
    """Yields a record a dim and system: the median rate of `repeats` runs, systems taking turns. Scores are compared first."""
    for dim in dims:
        with TemporaryDirectory(prefix="dpiframe-score-") as folder:
            w = workload("dcnv2", torch.device("cpu"), dim=dim, sizes=sizes, seed=seed, architecture=MODEL)
            job = _job(Path(folder), w, rows, device, seed)
            systems = {"eager": lambda job=job, w=w: _eager(job, w, device)}
            for name, threads in (("dpiframe-one-thread", 1), ("dpiframe", 0)):
                systems[name] = lambda job=job, n=threads: score_file(job, _ignore, n).rows_per_s
            cell = {
                "dim": dim,
                "fields": len(sizes),
                "rows": rows,
                "mlp": "64-32",
                "cross_layers": 2,
                "input": "parquet, encoded",
            }
            yield from _measured(systems, job, cell, failed, repeats)


def _measured(
    systems: dict[str, Callable[[], float]], job: ScoreJob, cell: dict[str, object], failed: Failed, repeats: int
) -> Iterator[Record]:
    rates: dict[str, list[float]] = {name: [] for name in systems}
    scores: dict[str, np.ndarray] = {}
    for _ in range(repeats):
        for name, system in systems.items():
            try:
                rates[name].append(system())
                scores[name] = pq.read_table(job.out, columns=["score"])["score"].to_numpy()
            except Exception as error:
                failed(name, error)
    for name, own in rates.items():
        if not own:
            continue
        worst = check(scores[name], scores["eager"], "fp32", name)
        yield record(
            "score", name, model="dcnv2", precision="fp32", cell=cell, rows_per_s=float(np.median(own)), max_abs_err=worst,
            rows_per_s_runs=[round(rate) for rate in own],
        )  # fmt: skip


def _ignore(done: float, rows: int) -> None:
    """No progress bar."""


def _job(folder: Path, w: Workload, rows: int, device: torch.device, seed: int) -> ScoreJob:
    write_bundle(
        folder / "bundle", name=w.name, version="benchmark", architecture=w.architecture, feature_schema=w.schema,
        dense=w.dense, tables=w.tables, vocabularies={}, golden=golden(w), provenance=Provenance(source="benchmarks"),
    )  # fmt: skip
    (block,) = drawn_blocks(w.schema, _DRAWN, 1, seed=seed)
    ids = block.wide_ids("candidate_ids")
    table = pa.table({f.name: ids[:, i] for i, f in enumerate(w.schema.features)})
    with pq.ParquetWriter(folder / "rows.parquet", table.schema) as writer:
        for first in range(0, rows, _DRAWN):
            writer.write_table(table.slice(0, min(_DRAWN, rows - first)))
    return ScoreJob(folder / "bundle", folder / "rows.parquet", folder / "out.parquet", encoded=True, device=str(device.type))


def _eager(job: ScoreJob, w: Workload, device: torch.device) -> float:
    """Rows a second of the script."""
    torch.set_num_threads(usable_cores())
    model = _on(w, device).module(Form(stacked=False))
    start, rows = time.perf_counter(), 0
    writer: pq.ParquetWriter | None = None
    with torch.inference_mode(), matmul_precision("fp32"), pq.ParquetFile(job.input) as file:
        for batch in file.iter_batches(_CHUNK):
            ids = torch.from_numpy(np.stack([column.to_numpy() for column in batch.columns], 1)).to(device)
            scores = model(ids).cpu().numpy()[:, 0]
            out = pa.Table.from_batches([batch]).append_column("score", pa.array(scores))
            writer = writer or pq.ParquetWriter(job.out, out.schema)
            writer.write_table(out)
            rows += batch.num_rows
    if writer is not None:
        writer.close()
    return rows / (time.perf_counter() - start)


def _on(w: Workload, device: torch.device) -> Workload:
    """The workload with its tables on a device."""
    return replace(w, tables={name: t.to(device) for name, t in w.tables.items()})
