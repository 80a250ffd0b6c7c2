"""What an engine may be told, and what it says of its warm-up. Plain data."""

from dataclasses import dataclass

from dpiframe_core.engine.calibration import Calibration
from dpiframe_core.errors import ConfigError, InputError
from dpiframe_core.fusion.passes import PASSES
from dpiframe_core.graph.schedule import POLICIES

AUTO, WAVES, REGIONS = "auto", "waves", "regions"
PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp8")}
DEFAULT_PRECISION = {"cpu": "fp32", "cuda": "tf32"}
FALLBACK = {"tf32": "fp32"}  # of a default precision that does not meet the golden rows
GOLDEN_TOLERANCE = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "fp8": 3e-2}  # on the probability, against the float32 source


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs its model; what it computes is the bundle's matter.

    Attributes:
        max_batch_rows: most rows of one run.
        lanes: batches in flight.
        buckets: rows of the captured graphs, () for geometric steps up to max_batch_rows.
        fusion: fusion passes to apply.
        policy: "waves", "regions", a scheduling policy of `graph.schedule`, or "auto": on a GPU the fastest for each bucket.
        max_streams: most CUDA streams of a policy that uses them.
        capture: replay CUDA graphs; False issues every operator anew (for profiling and the ablation).
        recall: take over the choices of an earlier warm-up of this bundle on this GPU (`tuning_cache`), and keep this one's.
    """

    max_batch_rows: int = 4096
    lanes: int = 2
    buckets: tuple[int, ...] = ()
    fusion: tuple[str, ...] = tuple(PASSES)
    policy: str = "auto"
    max_streams: int = 4
    capture: bool = True
    recall: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch_rows <= 65536:
            raise ConfigError(f"max_batch_rows: got {self.max_batch_rows}, expected 1 to 65536")
        if self.lanes < 1:
            raise ConfigError(f"lanes: got {self.lanes}, expected at least 1")
        if self.buckets and (min(self.buckets) < 1 or max(self.buckets) != self.max_batch_rows):
            raise ConfigError(f"buckets: got {self.buckets}, expected sizes from 1 up to max_batch_rows {self.max_batch_rows}")
        if self.policy not in (AUTO, WAVES, REGIONS, *POLICIES):
            raise ConfigError(f"policy: got {self.policy!r}, expected one of {', '.join((AUTO, WAVES, REGIONS, *POLICIES))}")


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What `Engine.warmup` did: buckets captured, seconds taken, largest deviation on the golden rows, device bytes held.

    captured_bytes: what the device's free memory fell by meanwhile: graphs, modules and the libraries' workspaces.
    calibrations: which program each bucket runs, and what was measured, with the tiles that waves had then; recalled: for how
    many an earlier warm-up told it.
    """

    device: str
    precision: str
    buckets: tuple[int, ...]
    lanes: int
    seconds: float
    golden_error: float
    golden_tolerance: float
    table_bytes: int
    buffer_bytes: int
    captured_bytes: int
    calibrations: tuple[Calibration, ...] = ()
    recalled: int = 0


def chosen_precision(asked: str | None, of_bundle: str | None, device: str) -> tuple[str, str | None]:
    """What is asked for, or else what the bundle asks for, or else the default of a "cpu" or "cuda"; and what a default falls
    back to that does not meet the golden rows.

    Raises:
        InputError: a precision that such a device does not have.
    """
    if device == "cpu":
        of_bundle = None  # it is about GPUs; a CPU computes in float32, which is at least as exact
    precision = asked or of_bundle or DEFAULT_PRECISION[device]
    if precision not in PRECISIONS[device]:
        raise InputError("precision", precision, f"one of {', '.join(PRECISIONS[device])} on {device}")
    return precision, None if asked or of_bundle else FALLBACK.get(precision)
