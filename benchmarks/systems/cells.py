"""What the suites' cells share: batches in rotation, precisions on offer, and the check that comes before any timing."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dpiframe_core.engine.options import GOLDEN_TOLERANCE, PRECISIONS

BATCHES_IN_ROTATION = 8
Failed = Callable[[str, Exception], None]  # told what failed and why; the suite goes on with the rest


def offered(precisions: Sequence[str], device: torch.device) -> list[str]:
    """Those of the precisions that the engine has on the device, and so a comparison can be of."""
    return [p for p in precisions if p in PRECISIONS[device.type]]


def check(scores: np.ndarray, expected: np.ndarray, precision: str, what: str) -> float:
    """The largest deviation of a probability.

    Raises:
        AssertionError: it is more than the precision allows: a time would mean nothing.
    """
    worst = float(np.abs(scores - expected).max())
    if not worst <= GOLDEN_TOLERANCE[precision]:
        raise AssertionError(f"{what}: got scores off by {worst}, expected at most {GOLDEN_TOLERANCE[precision]}")
    return worst
