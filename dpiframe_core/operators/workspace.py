"""The buffers of one batch in flight on a GPU, by what they are for. Knows no operator: those say what they need."""

from dataclasses import dataclass, field

import torch

from dpiframe_core.operators.executor import Values
from kernels.lookup.plan import Batch
from kernels.waves.wave_jobs import ShareOperands

ROWS_A_DONE_WORD = 8  # of common.cuh


def done_words(rows: int) -> int:
    """How many words of `Workspace.done` tell of so many rows."""
    return -(-rows // ROWS_A_DONE_WORD)


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Fixed buffers for as many rows as a lane's largest bucket has; smaller buckets use their first rows. Filled by
    `CudaOperators.allocate`; the programs of a lane share them, as one runs at a time.

    Attributes:
        batch: the staged rows, pinned. state: int32[STATE_WORDS] on the device, which lookups fill and later operators read.
        done: int32[done_words(rows)], pinned: the number of the batch whose scores are there.
        values: value name -> float[rows, padded width].
        context_rows: lookup node -> int32[rows], each row's context, where it writes some columns but once (`context_columns`).
        shares: layer -> what contexts share of its product, where that is computed once a context (`context_shares`); its x and
            context_of_row are those that the lookup writes, the same for all layers.
        joined: name of a `placement.Matrix` -> that matrix, of whose columns several values are views.
        maps: CIN node -> float32 matrices for the maps between its layers.
        links: chain node -> int64 words that its links wait for. head_sums: wave node -> those that its head waits for, if it
            ends in one.
    """

    batch: Batch
    state: torch.Tensor
    done: torch.Tensor
    values: Values = field(default_factory=dict)
    context_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    shares: dict[str, ShareOperands] = field(default_factory=dict)
    joined: dict[str, torch.Tensor] = field(default_factory=dict)
    maps: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    links: dict[str, torch.Tensor] = field(default_factory=dict)
    head_sums: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def bytes_used(self) -> int:
        """Device memory of the values and of what operators need beside them."""
        tensors = [*self.values.values(), *self.context_rows.values(), *self.joined.values()]
        tensors += [*self.links.values(), *self.head_sums.values()]
        tensors += [t for pair in self.maps.values() for t in pair]
        tensors += [t for own in self.shares.values() for t in (own.x, own.context_of_row, own.shares, own.done)]
        memory = (t.untyped_storage() for t in tensors if t.is_cuda)  # a lookup's values share theirs
        return sum({m.data_ptr(): m.nbytes() for m in memory}.values())
