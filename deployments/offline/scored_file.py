"""Writes scored rows to Parquet as they come, and keeps what the report at the end says of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from deployments.offline.output_file import replacing
from deployments.offline.score_job import ScorePlan
from dpiframe_core.errors import InputError
from dpiframe_core.evaluation.quality import RunningQuality
from dpiframe_core.features.row_block import Floats

_ROW_GROUP = 1 << 17  # rows that are written at once, or fewer that have
_GROUP_BYTES = 64 << 20  # so many bytes: what is held in memory until then


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one task: AUC (None if all labels are alike) and log-loss in nats."""

    score: str
    auc: float | None
    log_loss: float


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Filled by `ScoredFile.report`. seconds: from the first row read to the last one written, model load left out."""

    out: Path
    rows: int
    seconds: float
    oov_count: int
    quality: tuple[Quality, ...]

    @property
    def rows_per_s(self) -> float:
        return self.rows / max(self.seconds, 1e-9)

    def text(self) -> str:
        """For people."""
        lines = [f"{self.out}: {self.rows:,} rows in {self.seconds:.1f} s, {self.rows_per_s:,.0f} rows/s"]
        if self.oov_count:
            lines.append(f"values unknown to the model: {self.oov_count:,}")
        for q in self.quality:
            auc = "none, as all labels are alike" if q.auc is None else f"{q.auc:.6f}"
            lines.append(f"{q.score}: AUC {auc}, log-loss {q.log_loss:.6f}")
        return "\n".join(lines)


class ScoredFile:
    """The output while it is written. Memory grows by 5 bytes a row and task if there are labels, else not at all."""

    def __init__(self, path: Path, plan: ScorePlan) -> None:
        self._path, self._plan = path, plan
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._quality = [RunningQuality() for _ in plan.labels]
        self.rows = self.oov_count = 0
        self._start = time.perf_counter()

    def add(self, table: pa.Table, scores: Floats, labels: npt.NDArray[np.bool_] | None, oov_count: int) -> None:
        """Rows with their scores float32[n, tasks] and, if the plan names them, labels bool[n, tasks].

        Raises:
            InputError: the file cannot be written.
        """
        kept = table.select(self._plan.kept)
        for name, column in zip(self._plan.scores, scores.T, strict=True):
            kept = kept.append_column(name, pa.array(np.ascontiguousarray(column)))
        for i, quality in enumerate(self._quality):
            quality.add(labels[:, i].copy(), scores[:, i].copy())  # type: ignore[index]
        self.rows += kept.num_rows
        self.oov_count += oov_count
        self._waiting.append(kept)
        if sum(t.num_rows for t in self._waiting) >= _ROW_GROUP or sum(t.nbytes for t in self._waiting) >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting = []
        with self._written():
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, table.schema, use_dictionary=list(self._plan.kept))
            self._writer.write_table(table, row_group_size=_ROW_GROUP)

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:  # of a disk that is full, and of a column that Parquet cannot hold
            raise InputError("--out", str(self._path), f"a file that may be written ({error})") from error

    def close(self, *, complete: bool) -> None:
        """Writes what is left, if the file is to be complete, and closes it."""
        if complete:
            self._flush()
        if self._writer is not None:
            with self._written():
                self._writer.close()

    def report(self, out: Path) -> ScoreReport:
        """To be asked for after `close`; `out` is the file's final name."""
        seconds = time.perf_counter() - self._start
        quality = (Quality(name, *q.result()) for name, q in zip(self._plan.scores, self._quality, strict=False))
        return ScoreReport(out, self.rows, seconds, self.oov_count, tuple(quality))


@contextmanager
def scored_file(out: Path, plan: ScorePlan) -> Iterator[ScoredFile]:
    """A file that takes the place of `out` when the block ends well, and leaves nothing when it does not."""
    with replacing("--out", out) as unfinished:
        file = ScoredFile(unfinished, plan)
        complete = False
        try:
            yield file
            complete = True
        finally:
            file.close(complete=complete)
