"""What a model in plain PyTorch takes of a batch: a few tensors at fixed places of one buffer, so that one copy brings all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Self

import numpy as np
import torch

from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema

_ALIGN = 256
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor: int32 ids (-1: none), float32 numbers, or the context of each row."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype  # type: ignore[type-arg]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class PeerInputs:
    """The inputs of a module, in the order of its arguments: candidate_ids[rows, ids], candidate_dense[rows, numbers],
    context_ids[contexts, ids], context_dense[contexts, numbers], request_of_row[rows]. Those that a schema has; the last only
    for several contexts.
    """

    parts: tuple[Part, ...]
    nbytes: int
    _packed: dict[RowBlock, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: FeatureSchema, rows: int, contexts: int = 1) -> Self:
        layout = schema.block_layout
        widths = [
            ("candidate_ids", rows, len(layout.candidate_ids.widths), np.int32),
            ("candidate_dense", rows, layout.candidate_dense, np.float32),
            ("context_ids", contexts, len(layout.context_ids.widths), np.int32),
            ("context_dense", contexts, layout.context_dense, np.float32),
        ]
        shapes = [(name, (n, width), np.dtype(kind)) for name, n, width, kind in widths if width]
        if contexts > 1 and any(name.startswith("context") for name, *_ in shapes):
            shapes.append(("request_of_row", (rows,), np.dtype(np.int32)))
        parts, at = [], 0
        for name, shape, kind in shapes:
            parts.append(Part(name, shape, kind, at))
            at += -(-parts[-1].nbytes // _ALIGN) * _ALIGN
        return cls(tuple(parts), at)

    def packed(self, block: RowBlock) -> np.ndarray:
        """uint8[nbytes] of a batch. Kept: no timed call pays for it."""
        if block not in self._packed:
            out = np.zeros(self.nbytes, np.uint8)
            for part in self.parts:
                values = block.wide_ids(part.name) if part.name.endswith("ids") else getattr(block, part.name)  # type: ignore[arg-type]
                out[part.start : part.start + part.nbytes] = np.ascontiguousarray(values, part.dtype).reshape(-1).view(np.uint8)
            self._packed[block] = out
        return self._packed[block]

    def views(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors in a buffer uint8[nbytes]."""
        return [buffer[p.start : p.start + p.nbytes].view(_DTYPES[p.dtype]).view(p.shape) for p in self.parts]

    def tensors(self, block: RowBlock, device: torch.device) -> Sequence[torch.Tensor]:
        """A batch's own tensors on a device."""
        return self.views(torch.from_numpy(self.packed(block)).to(device))
