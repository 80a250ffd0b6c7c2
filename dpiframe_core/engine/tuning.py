"""What a warm-up finds fastest on a GPU, taken over from an earlier one where it is known: programs of buckets, and ways in
which their operators compute.
"""

import logging
from collections.abc import Mapping, Sequence

import torch

from dpiframe_core.engine.calibration import Calibration
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.engine.program import CpuProgram, CudaProgram
from dpiframe_core.engine.tuning_cache import TuningKey, load_choices, store_choices, tuning_key

log = logging.getLogger(__name__)


class Tuning:
    """Which program each bucket runs. Lanes share it: the first to warm up fills `calibrations`, by bucket.

    Args:
        programs: to choose from; of a CPU's there is no choice. key: where choices are kept from start to start, if they are.
    """

    def __init__(self, programs: Sequence[CpuProgram | CudaProgram], buckets: Sequence[int], key: TuningKey | None) -> None:
        self.programs = [p for p in programs if isinstance(p, CudaProgram)]
        self.calibrations: dict[int, Calibration] = {}
        self._buckets, self._key = tuple(buckets), key

    def recall(self) -> int:
        """Takes over what an earlier warm-up found; for how many buckets it did."""
        if self._key is not None:
            self.calibrations |= recall_choices(self.programs, load_choices(self._key), self._buckets)
        return len(self.calibrations)

    @property
    def found(self) -> tuple[Calibration, ...]:
        """Of each bucket, the smallest first; none on a CPU."""
        return tuple(self.calibrations[b] for b in sorted(self.calibrations))

    def remember(self) -> None:
        """Keeps what was found for the next warm-up, and logs it."""
        for c in self.found:
            log.info("bucket %d runs %s, %.2fx the next best of %s us", c.bucket, c.program, c.gain, dict(c.microseconds))
        if self._key is not None:
            store_choices(self._key, warmup_choices(self.programs, self.calibrations))


def engine_key(fingerprint: str, precision: str, device: torch.device, o: EngineOptions) -> TuningKey | None:
    """What a GPU's choices depend on: beside the bundle, how its graph is laid out. None where no choices are to be kept."""
    about = f"{fingerprint} {o.policy} {o.max_streams} {','.join(o.fusion)}"
    return tuning_key(about, precision, device) if device.type == "cuda" and o.recall else None


def recall_choices(programs: Sequence[CudaProgram], known: Mapping[str, str], buckets: Sequence[int]) -> dict[int, Calibration]:
    """Takes over an earlier warm-up's choices, where they name what exists: ways of its operators, and buckets' programs."""
    for program in programs:
        own = f"{program.operators_name}/"
        program.operators.recall({k.removeprefix(own): v for k, v in known.items() if k.startswith(own)})
    able = {b: {p.name for p in programs if p.fits(b)} for b in buckets}
    found = {b: known.get(f"program@{b}", "") for b in buckets}
    return {b: Calibration(b, name, {}) for b, name in found.items() if name in able[b]}


def warmup_choices(programs: Sequence[CudaProgram], calibrations: Mapping[int, Calibration]) -> dict[str, str]:
    """What a warm-up chose, by names such as "waves/wave.1@256", and "program@256"."""
    choices = {f"{p.operators_name}/{k}": v for p in programs for k, v in p.operators.choices.items()}
    return choices | {f"program@{b}": c.program for b, c in calibrations.items()}
