"""The lookup over rows that GPUs hold in shares by collectives (NCCL), in the best form that we know.

Each process has a batch of its own. All gather the ids of all, each sums what it holds of every bag, and the sums are reduced
and scattered. Every id has its place, so no process has to learn how many it gets, and the host waits for nothing: all of it is
one CUDA graph. To gather all ids moves 4 bytes an id and GPU. To send each to its owner alone, they would have to be sorted, by
one more pass over them, and the host would wait for lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.gpus.group import Group

FORMS = ("reduce-scatter", "all-to-all")


@dataclass(frozen=True, eq=False)
class Share:
    """What a process holds of the tables, all of as many rows: [tables, rows, dim], of each table's rows from `begin` on."""

    weight: torch.Tensor
    begin: int


class Collective:
    """A lookup of bags, each of `pooling` ids, summed.

    Args:
        ids: int32[rows, tables * pooling] of each batch, on the device. form: of the last step, one of `FORMS`.

    Attributes:
        out: float16[rows, tables * dim] of the last call.
    """

    def __init__(self, group: Group, share: Share, ids: Sequence[torch.Tensor], pooling: int, form: str) -> None:
        self._group, self._share, self._pooling, self._form = group, share, pooling, form
        self._ids = ids
        rows, width = ids[0].shape
        tables, _, dim = share.weight.shape
        device = share.weight.device
        self._every = torch.empty(group.size * rows, width, dtype=torch.int32, device=device)
        self._sums = torch.empty(group.size * rows, tables * dim, dtype=torch.float16, device=device)
        self._parts = torch.empty_like(self._sums)
        self.out = torch.empty(rows, tables * dim, dtype=torch.float16, device=device)
        self._pool = pooled_on_gpu() if device.type == "cuda" else pooled

    def __call__(self, i: int) -> torch.Tensor:
        own = self._ids[i % len(self._ids)]
        if self._group.size == 1:
            self._pool(self._share, own, self._pooling, self.out)
            return self.out
        dist.all_gather_into_tensor(self._every, own)
        self._pool(self._share, self._every, self._pooling, self._sums)
        if self._form == "reduce-scatter":
            dist.reduce_scatter_tensor(self.out, self._sums)
        else:
            dist.all_to_all_single(self._parts, self._sums)
            torch.sum(self._parts.view(self._group.size, *self.out.shape), 0, out=self.out)
        return self.out


def pooled(share: Share, ids: torch.Tensor, pooling: int, out: torch.Tensor) -> None:
    """The sums of what a share has of each bag, plainly."""
    tables, held, dim = share.weight.shape
    own = ids.long().view(len(ids), tables, pooling) - share.begin
    here = (own >= 0) & (own < held)
    flat = torch.arange(tables)[None, :, None] * held + own.clamp(0, held - 1)
    rows = share.weight.view(-1, dim)[flat].float() * here[..., None]
    out.copy_(rows.sum(2).view(len(ids), tables * dim))


def pooled_on_gpu() -> Callable[[Share, torch.Tensor, int, torch.Tensor], None]:
    """The same by one kernel."""
    from benchmarks.gpus.pool_triton import pool

    def call(share: Share, ids: torch.Tensor, pooling: int, out: torch.Tensor) -> None:
        tables, held, dim = share.weight.shape
        bags, block = len(ids) * tables, 1024 // dim
        pool[(-(-bags // block),)](
            ids, share.weight, out, bags, tables, held, share.begin, POOLING=pooling, DIM=dim, BLOCK=block, num_warps=4
        )

    return call
