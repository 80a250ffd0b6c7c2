"""Scores tables of rows on an engine of its own, for whoever brings them: threads of this process or an actor of a cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deployments.offline.score_job import ScoreJob, ScorePlan
from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import InputError
from dpiframe_core.features.row_block import Floats
from dpiframe_core.files.table_rows import TableEncoder


@dataclass(frozen=True, slots=True, eq=False)
class ScoredChunk:
    """Scored rows: float32[n, tasks], bool[n, tasks] if the job names labels, and how many raw values were unknown."""

    table: pa.Table
    scores: Floats
    labels: npt.NDArray[np.bool_] | None
    oov_count: int


class ChunkScorer:
    """Owns an engine, warmed up. Safe to use from `lanes` threads at once."""

    def __init__(self, job: ScoreJob, plan: ScorePlan, bundle: Bundle, lanes: int = 2) -> None:
        """Raises what `Engine` and `Engine.warmup` raise."""
        buckets = () if job.chunk_rows < 1024 else (256, 1024, job.chunk_rows)  # all chunks but the last are of one size
        options = EngineOptions(max_batch_rows=job.chunk_rows, lanes=lanes, buckets=tuple(sorted({*buckets})))
        self._engine = Engine(bundle, job.device, job.precision, options)
        self._engine.warmup()
        self.device, self.precision = self._engine.device, self._engine.precision
        self._encoder = TableEncoder(self._engine.encoder, job.encoded)
        self._plan = plan

    def __call__(self, table: pa.Table, number: Callable[[int], int]) -> ScoredChunk:
        """Scores rows; `number` tells a row's number in the file, from 1, of its place in the table, from 0.

        Raises:
            InputError: a bad value, named by file, row and column.
        """

        def place(name: str, row: int) -> str:
            return self._plan.file.place(name, number(row))

        block = self._encoder.encode(table, place)
        labels = [_label(table[name].combine_chunks(), partial(place, name)) for name in self._plan.labels]
        scores = self._engine.submit(block)
        return ScoredChunk(table, scores, np.stack(labels, 1) if labels else None, block.oov_count)

    def close(self) -> None:
        """Releases the engine."""
        self._engine.close()


def _label(column: Any, place: Callable[[int], str]) -> npt.NDArray[np.bool_]:
    """bool[n] of a column of 0 and 1, whatever its type."""
    kind = column.type
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise InputError(place(0), column[0].as_py(), "0 or 1")
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)  # null becomes NaN or None
    good = (values == 0) | (values == 1)
    if not good.all():
        row = int(np.argmin(good))
        raise InputError(place(row), column[row].as_py(), "0 or 1")
    return values.astype(np.bool_)
