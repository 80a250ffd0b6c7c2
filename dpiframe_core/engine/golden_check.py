"""Whether a lane computes what the source model did: its scores on the bundle's golden rows, within a precision's tolerance."""

import numpy as np

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.bundle.golden import Golden
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.options import GOLDEN_TOLERANCE
from dpiframe_core.errors import BundleError


def golden_tolerance(bundle: Bundle, precision: str) -> float:
    """Largest deviation of a probability on the golden rows at which an engine serves."""
    overrides = {str(k): v for k, v in bundle.manifest.golden.tolerance.items()}
    return overrides.get(precision, GOLDEN_TOLERANCE[precision])


def golden_error(lane: CpuLane | CudaLane, golden: Golden, max_batch_rows: int) -> float:
    """Largest deviation on the golden rows: all of them, and repeated so often that they fill each bucket of the lane."""
    rows = golden.block.rows
    step = min(rows, max_batch_rows)
    spans = [[(i, min(i + step, rows))] for i in range(0, rows, step)]
    for bucket in lane.buckets if isinstance(lane, CudaLane) else ():
        whole, rest = divmod(bucket, rows)
        spans.append([(0, rows)] * whole + [(0, rest)] * (rest > 0))
    worst = 0.0
    for parts in spans:
        blocks, want = [golden.block.part(*span) for span in parts], [golden.scores[start:stop] for start, stop in parts]
        found = [lane.run(blocks)]
        if isinstance(lane, CudaLane) and lane.copies:
            found.append(lane.run(blocks, copied=True))
        worst = max(worst, *(float(np.abs(result.scores - np.concatenate(want)).max()) for result in found))
    return worst


def check_golden_error(error: float, bundle: Bundle, precision: str, device: str) -> None:
    """Raises BundleError if the scores are off by more than the precision's tolerance."""
    tolerance = golden_tolerance(bundle, precision)
    if not error <= tolerance:
        way_out = "" if precision == "fp32" else "; use a higher precision, or raise golden.tolerance in model.yaml"
        raise BundleError(
            f"{bundle.path}: golden rows: got scores off by {error:.3g} at {precision} on {device}, "
            f"expected at most {tolerance:.3g}{way_out}"
        )
