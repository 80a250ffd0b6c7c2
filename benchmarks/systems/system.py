"""What every system under measurement is: a call from a batch in host memory to scores in host memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dpiframe_core.features.row_block import RowBlock

Score = Callable[[RowBlock], np.ndarray]


@dataclass(frozen=True, eq=False)
class System:
    """A way to score, host to host, to be called under `torch.inference_mode`. `close` frees what it holds.

    device_us: device-only time of one call, replayed back to back; None where it cannot be told from the launches.
    first_op_s: seconds of one call from its first operator's launch, the ids being there, to the scores in host memory.
    notes: what its records say besides.
    """

    score: Score
    close: Callable[[], None] = lambda: None
    device_us: Callable[[RowBlock], float | None] = lambda block: None
    first_op_s: Callable[[RowBlock], float] | None = None
    notes: Mapping[str, object] = field(default_factory=dict)
