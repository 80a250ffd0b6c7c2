"""What a warm-up finds fastest on a GPU, taken over from an earlier one where it is known: programs of buckets, and ways in
which their operators compute.
"""

from collections.abc import Mapping, Sequence

import torch

from dpiframe_core.engine.calibration import Calibration
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.engine.program import CpuProgram, CudaProgram
from dpiframe_core.engine.tuning_cache import TuningKey, load_choices, store_choices, tuning_key


class Tuning:
    """Which program each bucket runs. Lanes share it: the first to warm up fills `calibrations`, by bucket.

    Args:
        programs: to choose from; of a CPU's there is no choice.
        fingerprint, precision, device: of the bundle and what runs it, which choices depend on, beside the options.
    """

    def __init__(
        self,
        programs: Sequence[CpuProgram | CudaProgram],
        buckets: Sequence[int],
        *,
        fingerprint: str,
        precision: str,
        device: torch.device,
        options: EngineOptions,
    ) -> None:
        self.programs = [p for p in programs if isinstance(p, CudaProgram)]
        self.calibrations: dict[int, Calibration] = {}
        self._buckets, self._fingerprint, self._precision = tuple(buckets), fingerprint, precision
        self._device, self._options = device, options

    def recall(self) -> int:
        """Takes over what an earlier warm-up found; for how many buckets it did."""
        if self.programs and self._options.recall:
            self.calibrations |= recall_choices(self.programs, load_choices(self._key()), self._buckets)
        return len(self.calibrations)

    def remember(self) -> None:
        """Keeps what was found for the next warm-up."""
        if self.programs and self._options.recall:
            store_choices(self._key(), warmup_choices(self.programs, self.calibrations))

    def _key(self) -> TuningKey:
        """Beside the bundle, how its graph is laid out."""
        o = self._options
        about = f"{self._fingerprint} {o.policy} {o.max_streams} {','.join(o.fusion)}"
        return tuning_key(about, self._precision, self._device)


def recall_choices(programs: Sequence[CudaProgram], known: Mapping[str, str], buckets: Sequence[int]) -> dict[int, Calibration]:
    """Takes over an earlier warm-up's choices, where they name what exists: ways of its operators, and buckets' programs."""
    for program in programs:
        own = f"{program.operators_name}/"
        program.operators.recall({k.removeprefix(own): v for k, v in known.items() if k.startswith(own)})
    able = {b: {p.name for p in programs if p.operators.fits(b)} for b in buckets}
    found = {b: known.get(f"program@{b}", "") for b in buckets}
    return {b: Calibration(b, name, {}) for b, name in found.items() if name in able[b]}


def warmup_choices(programs: Sequence[CudaProgram], calibrations: Mapping[int, Calibration]) -> dict[str, str]:
    """What a warm-up chose, by names such as "waves/wave.1@256", and "program@256"."""
    choices = {f"{p.operators_name}/{k}": v for p in programs for k, v in p.operators.choices.items()}
    return choices | {f"program@{b}": c.program for b, c in calibrations.items()}
