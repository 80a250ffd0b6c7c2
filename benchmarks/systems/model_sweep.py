"""The cells of a suite over models: models x precisions x batches on one device, and how each is timed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.systems.cells import BATCHES_IN_ROTATION, Failed, offered
from benchmarks.workloads.blocks import drawn_blocks
from benchmarks.workloads.models import workload
from benchmarks.workloads.workload import Workload
from dpiframe_core.features.row_block import RowBlock


@dataclass(frozen=True, slots=True)
class ModelSweep:
    """What the suites over models are told alike.

    Attributes:
        failed: is told of what failed; the rest is measured all the same.
        seconds: of timing, a system and cell.
        skew: how ids are drawn, "zipf" or "uniform".
        contexts: of a batch, for models whose rows share features.
        most_rows: caps every table; None: as published.
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
    contexts: Sequence[int] = (1,)
    most_rows: int | None = None
    make: Callable[..., Workload] = workload

    def workloads(self) -> Iterator[Workload]:
        """One model after the other; the GPU's memory that torch kept of the last is given back before the next is built."""
        for model in self.models:
            yield self.make(model, self.device, seed=self.seed, **({"most_rows": self.most_rows} if self.most_rows else {}))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def offered(self) -> list[str]:
        """Those of the precisions that the engine has on the device."""
        return offered(self.precisions, self.device)

    def sizes(self, w: Workload) -> Iterator[tuple[int, int]]:
        """(rows, contexts) of each batch size. No batch has more contexts than rows, or several where rows share nothing."""
        for rows in self.batches:
            yield from ((rows, n) for n in (self.contexts if w.has_contexts else (1,)) if n <= rows)

    def blocks(self, w: Workload, rows: int, contexts: int = 1) -> list[RowBlock]:
        """A cell's batches in rotation."""
        given = {"contexts": contexts, "skew": self.skew, "seed": self.seed + rows}
        return drawn_blocks(w.schema, rows, BATCHES_IN_ROTATION, **given)  # type: ignore[arg-type]

    def cell(self, w: Workload, contexts: int = 1) -> dict[str, str | int]:
        """What names a cell beside model, precision and rows."""
        named: dict[str, str | int] = {"ids": self.skew}
        if w.has_contexts:
            named["contexts"] = contexts
        if w.quantized:
            named["tables"] = "int8"
        if self.most_rows:
            named["max_rows"] = self.most_rows
        return named
