"""Where the rows of tables lie: plain data. To be replaced by the planner's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TablePlacement:
    table: str
    rows: int
    hot: int
    warm: int


@dataclass(frozen=True, slots=True)
class Placement:
    gpus: int
    tables: tuple[TablePlacement, ...]
    ranks: Mapping[str, npt.NDArray[np.uint32]] = field(default_factory=dict)
