"""The cells of a suite over models: models x precisions x batches on one device, and how each is timed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.systems.cells import BATCHES_IN_ROTATION, Failed, offered
from benchmarks.systems.workload import Workload, id_blocks, workload
from dpiframe_core.features.row_block import RowBlock


@dataclass(frozen=True, slots=True)
class ModelSweep:
    """What the suites over models are told alike.

    Attributes:
        failed: is told of what failed; the rest is measured all the same.
        seconds: of timing, a system and cell.
        skew: how ids are drawn, "zipf" or "uniform".
        make: builds a workload by name; tests make small ones.
    """

    models: Sequence[str]
    precisions: Sequence[str]
    batches: Sequence[int]
    device: torch.device
    failed: Failed
    seconds: float
    seed: int = 0
    skew: str = "zipf"
    make: Callable[..., Workload] = workload

    def workloads(self) -> Iterator[Workload]:
        """One model after the other; the GPU's memory that torch kept of the last is given back before the next is built."""
        for model in self.models:
            yield self.make(model, self.device, seed=self.seed)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def offered(self) -> list[str]:
        """Those of the precisions that the engine has on the device."""
        return offered(self.precisions, self.device)

    def blocks(self, w: Workload, rows: int) -> list[RowBlock]:
        """A cell's batches in rotation."""
        return id_blocks(w.schema, rows, BATCHES_IN_ROTATION, skew=self.skew, seed=self.seed + rows)
