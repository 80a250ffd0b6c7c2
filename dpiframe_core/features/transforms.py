"""The transforms of numeric features, as a schema names them. Pure data; `feature_readers` applies them."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpiframe_core.errors import shown
from dpiframe_core.strict import Strict


class Log(Strict):
    """x -> ln(max(x, minimum) + offset)."""

    type: Literal["log"] = "log"
    offset: float = 1.0
    minimum: float = 0.0

    @model_validator(mode="after")
    def _domain(self) -> Self:
        if self.minimum + self.offset <= 0:
            raise ValueError(f"got minimum {self.minimum} + offset {self.offset}, expected a sum above 0")
        return self


class Standardize(Strict):
    """x -> (x - mean) / std."""

    type: Literal["standardize"] = "standardize"
    mean: float
    std: Annotated[float, Field(gt=0)]


class MinMax(Strict):
    """x -> (x - minimum) / (maximum - minimum), clipped to [0, 1] if `clip`."""

    type: Literal["minmax"] = "minmax"
    minimum: float
    maximum: float
    clip: bool = False

    @model_validator(mode="after")
    def _span(self) -> Self:
        if self.maximum <= self.minimum:
            raise ValueError(f"got maximum {self.maximum}, expected more than the minimum {self.minimum}")
        return self


class Bucketize(Strict):
    """x -> first_id + number of boundaries <= x: an id, so it must come last and the feature needs a table.

    `first_id` may be left out where the table has exactly one row a bucket: it is 0 then.
    """

    type: Literal["bucketize"] = "bucketize"
    boundaries: Annotated[tuple[float, ...], Field(min_length=1)]
    first_id: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if any(b <= a for a, b in pairwise(self.boundaries)):
            raise ValueError(f"boundaries: got {shown(list(self.boundaries))}, expected strictly ascending values")
        return self
