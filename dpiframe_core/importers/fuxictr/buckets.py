"""FuxiCTR's `convert_to_bucket` of the Criteo data set: numbers cut at squares of their logarithm, as buckets of a schema.

fuxictr/datasets/criteo.py: x -> floor(ln(x)^2) above 2, else x without its fraction; the result is a token of the vocabulary.
Here a bucket's id is its place on the number line, so tables are read in another order: `rows` says which row each bucket has.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpiframe_core.features.transforms import Bucketize

PREPROCESS = "convert_to_bucket"


@dataclass(frozen=True, slots=True)
class LogSquareBuckets:
    """`transform` with first_id 0; `rows`: bucket -> row of FuxiCTR's table. `of` tells a value's bucket."""

    transform: Bucketize
    rows: tuple[int, ...]

    def of(self, value: float) -> int:
        return sum(b <= value for b in self.transform.boundaries)


def log_square_buckets(tokens: Mapping[int, int], oov: int) -> LogSquareBuckets:
    """The buckets of a vocabulary of integers; what lies outside, or between, is unknown: row `oov`."""
    lowest, highest = min([*tokens, 0]), max([*tokens, 3])
    starts: list[tuple[float, int]] = []  # the least number of each bucket, and its token
    for token in range(lowest, 3):
        # Below 1 the fraction is cut towards zero: (-3, -2] is -2, (-1, 1) is 0.
        starts.append((math.nextafter(token - 1, math.inf) if token <= 0 else float(token), token))
    starts.append((math.nextafter(2.0, math.inf), 0))
    starts += [(_least_with_square(token), token) for token in range(1, highest + 2)]
    return LogSquareBuckets(
        Bucketize(boundaries=tuple(start for start, _ in starts), first_id=0),
        (oov, *(tokens.get(token, oov) for _, token in starts)),
    )


def _least_with_square(square: int) -> float:
    """The least float64 x > 2 with ln(x)^2 >= square, as floats compute it."""
    x = math.exp(math.sqrt(square))
    while math.log(x) ** 2 >= square:
        x = math.nextafter(x, 0.0)
    while math.log(x) ** 2 < square:
        x = math.nextafter(x, math.inf)
    return x
