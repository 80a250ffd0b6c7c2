"""What a GPU's lane has compiled, and in which order: without one."""

from dataclasses import dataclass
from types import SimpleNamespace

from dpiframe_core.engine.calibration import Calibration
from dpiframe_core.engine.cuda_lane import CudaLane
from kernels.runtime.source import KernelSource

BUCKETS = (1, 8, 512)


@dataclass(frozen=True)
class Operators:
    """Of one kernel for each bucket."""

    name: str

    def sources(self, rows: int, *, ahead: bool, on_device: bool) -> list[KernelSource]:
        return [KernelSource.of("test/lane", f"{self.name}{'+' * on_device}", {"ROWS": str(rows), "AHEAD": str(ahead)}, 0)]


def program(name: str, operators: str, most: int = BUCKETS[-1]) -> SimpleNamespace:
    return SimpleNamespace(name=name, operators=Operators(operators), fits=lambda rows: rows <= most)


def asked(calibrations=None, on_device=None, large=()):
    lane = CudaLane.__new__(CudaLane)
    made = [program("waves", "waves"), program("chain", "chain", 8), program("streams", "plain"), program("one", "plain")]
    lane._programs, lane._calibrations = {p.name: p for p in made}, calibrations or {}
    lane.buckets, lane._capture, lane._on_device = BUCKETS, False, on_device
    lane._is_large = lambda rows: rows in large
    return [(source.name, int(dict(source.constants)["ROWS"])) for source in lane._sources()]


def test_the_largest_bucket_comes_first_and_programs_that_share_operators_ask_once():
    rest = [("waves", 8), ("chain", 8), ("plain", 8), ("waves", 1), ("chain", 1), ("plain", 1)]
    assert asked() == [("waves", 512), ("plain", 512), *rest]


def test_where_a_program_is_known_it_alone_is_compiled():
    known = {512: Calibration(512, "one", {}), 8: Calibration(8, "chain", {}), 1: Calibration(1, "gone", {})}
    assert asked(known) == [("plain", 512), ("chain", 8), ("waves", 1), ("chain", 1), ("plain", 1)]


def test_large_buckets_read_rows_on_the_device_too_where_these_are_copied():
    assert ("waves+", 512) in asked(on_device=object(), large=(512,))
    assert ("waves+", 512) not in asked(large=(512,))
