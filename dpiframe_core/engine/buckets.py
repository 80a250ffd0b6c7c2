"""Decides which batch sizes ("buckets") get a captured graph; a batch runs at the next larger one. Plain NumPy, no device.

By default they grow geometrically. From a record of batch sizes as the service met them, `tuned_buckets` finds the best ones.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from dpiframe_core.strict import Strict

Counts = npt.NDArray[np.int64]  # [max_batch_rows + 1]: how many batches had that many rows

_MOST_CANDIDATES = 4096  # sizes that the search weighs against one another; it takes their square in time (0.5 s for all 4,096)
_UNSEEN = 0.01  # share of batches taken to be of sizes that the record may have missed, as many in each doubling of the size


class BatchSizes(Strict):
    """How many batches of each size an engine ran. The service's answer to `GET /v1/batch-sizes`, and what `tune` reads.

    Attributes:
        max_batch_rows: the most rows that a batch could have. counts: rows -> batches; sizes that never came are left out.
        buckets: those in use then, () where batches ran at their own size. padding_waste: what `padding_waste` says of them.
    """

    model: str | None = None
    version: str | None = None
    max_batch_rows: Annotated[int, Field(ge=1, le=65536)]
    counts: Mapping[int, Annotated[int, Field(ge=0, le=2**46)]]
    buckets: tuple[int, ...] = ()
    padding_waste: float = 0.0

    @model_validator(mode="after")
    def _sizes_are_possible(self) -> Self:
        for rows in self.counts:
            if not 1 <= rows <= self.max_batch_rows:
                raise ValueError(f"counts: got a batch of {rows} rows, expected 1 to max_batch_rows {self.max_batch_rows}")
        return self

    @property
    def array(self) -> Counts:
        counts = np.zeros(self.max_batch_rows + 1, np.int64)
        for rows, count in self.counts.items():
            counts[rows] = count
        return counts


def batch_sizes(model: str, version: str, buckets: tuple[int, ...], counts: Counts) -> BatchSizes:
    """What an engine counted, as it is shown."""
    met = {int(rows): int(counts[rows]) for rows in np.flatnonzero(counts)}
    waste = padding_waste(buckets, counts)
    return BatchSizes(
        model=model, version=version, max_batch_rows=len(counts) - 1, counts=met, buckets=buckets, padding_waste=waste
    )


def geometric_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 8, 16, then steps of at most 1.5x up to `max_rows`: above 8 rows at most half as many again are computed."""
    sizes = {size for k in range(3, 31) for size in (2**k, 2**k + 2 ** (k - 1)) if size < max_rows} - {12}
    return tuple(sorted({1, max_rows} | sizes))


def bucket_of(buckets: Sequence[int], counts: Counts) -> npt.NDArray[np.int64]:
    """For each number of rows up to the largest bucket, the smallest bucket that holds it."""
    sizes = np.asarray(sorted(buckets), np.int64)
    return sizes[np.searchsorted(sizes, np.arange(len(counts)))]


def padding_waste(buckets: Sequence[int], counts: Counts) -> float:
    """Padded rows over computed rows, 0 to 1, of the batches counted. Without buckets nothing is padded."""
    if not buckets or not counts.any():
        return 0.0
    batches = counts.astype(np.float64)
    return 1.0 - float(batches @ np.arange(len(counts))) / float(batches @ bucket_of(buckets, counts))


def mean_cost(buckets: Sequence[int], counts: Counts, cost: npt.NDArray[np.float64]) -> float:
    """Mean cost of the batches counted. `cost[b]` is that of a bucket of b rows."""
    return float(counts @ cost[bucket_of(buckets, counts)] / counts.sum())


def tuned_buckets(
    counts: Counts, how_many: int, cost: npt.NDArray[np.float64] | None = None, *, unseen: float = _UNSEEN
) -> tuple[int, ...]:
    """At most `how_many` buckets, the largest possible batch among them, of the least expected cost.

    Args:
        counts: int64[max_rows + 1], batches by rows.
        cost: float64[max_rows + 1], the cost of a bucket by its rows, taken not to fall from one size to the next; without it,
            the rows themselves.
        unseen: share of batches taken to be of sizes evenly spread over log(rows). Without it a size that the record missed
            may have to run at a bucket many times its own.

    Exact up to 4,096 sizes; of more, only multiples are candidates.
    """
    max_rows = len(counts) - 1
    if how_many < 1:
        raise ValueError(f"buckets: got {how_many}, expected at least 1")
    rows = np.arange(max_rows + 1)
    weights = counts / counts.sum()
    spread = 1.0 / np.maximum(rows, 1)
    spread[0] = 0.0
    weights = (1 - unseen) * weights + unseen * spread / spread.sum()
    step = -(-max_rows // _MOST_CANDIDATES)
    candidates = np.unique(np.minimum(np.arange(step, max_rows + step, step), max_rows))
    if unseen == 0.0:  # a bucket that no batch of its own size uses could be made smaller
        used = np.searchsorted(candidates, np.flatnonzero(weights))
        candidates = candidates[np.unique(np.append(used, len(candidates) - 1))]
    each = np.maximum.accumulate(cost)[candidates] if cost is not None else candidates.astype(np.float64)
    below = np.cumsum(weights)[candidates]  # share of batches of at most that many rows

    # least[j]: least cost of all batches up to candidate j, that being the largest bucket, for a growing number of buckets.
    least = below * each
    before: list[npt.NDArray[np.int64]] = []
    for _ in range(min(how_many, len(candidates)) - 1):
        improved, came_from = least.copy(), np.full(len(candidates), -1)
        for j in range(1, len(candidates)):
            options = least[:j] + (below[j] - below[:j]) * each[j]
            i = int(options.argmin())
            if options[i] < improved[j]:
                improved[j], came_from[j] = options[i], i
        before.append(came_from)
        least = improved
    chosen, j = [], len(candidates) - 1
    for came_from in reversed(before):
        if came_from[j] >= 0:
            chosen.append(int(candidates[j]))
            j = int(came_from[j])
    return tuple(sorted({*chosen, int(candidates[j])}))
