"""Measures what a batch of each size costs on a device, for `buckets.tuned_buckets`."""

import statistics

import numpy as np
import numpy.typing as npt

from dpiframe_core.engine.buckets import geometric_buckets
from dpiframe_core.engine.engine import Engine
from dpiframe_core.features.examples import sample_block


def measured_costs(engine: Engine, rounds: int = 50) -> npt.NDArray[np.float64]:
    """float64[max_batch_rows + 1]: microseconds of a warm engine from a batch's hand-over to its scores, by rows.

    Medians at the engine's buckets, and straight lines between them: a graph for every size would take minutes to capture.
    Rounds go over all sizes in turn, so that a clock that is still rising favours none of them.
    """
    sizes = engine.buckets or geometric_buckets(engine.max_batch_rows)
    blocks = [sample_block(engine.schema, size) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(rounds):
        for block, taken in zip(blocks, times, strict=True):
            taken.append(engine.run_batch((block,)).device_ms * 1e3)
    return np.interp(np.arange(engine.max_batch_rows + 1), sizes, [statistics.median(taken) for taken in times])
