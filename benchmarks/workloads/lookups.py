"""Lookups in plain PyTorch: a table a field, and all tables stacked into one. ids int32[rows, columns] -> [rows, dims]."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import embedding, embedding_bag

_MOST_ROWS = 65536  # of an engine's batch, and so of any peer's


class TablePerField(nn.Module):
    """One nn.Embedding (of several ids: nn.EmbeddingBag) a field, read in a loop and concatenated.

    Args:
        bags: ids of each field, summed; one id each by default.
        exact: sums of float16 rows in float32.
    """

    def __init__(self, tables: Sequence[torch.Tensor], bags: Sequence[int] | None = None, *, exact: bool = False) -> None:
        super().__init__()
        self.bags = list(bags or [1] * len(tables))
        self.exact = exact
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(t) if bag == 1 or exact else nn.EmbeddingBag.from_pretrained(t, mode="sum")
            for t, bag in zip(tables, self.bags, strict=True)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if max(self.bags) == 1:
            return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        bags = zip(self.tables, ids.split(self.bags, 1), strict=True)
        if self.exact:
            return torch.cat([table(own).float().sum(1) for table, own in bags], 1)
        return torch.cat([table(own[:, 0] if own.shape[1] == 1 else own) for table, own in bags], 1)


class Stacked(nn.Module):
    """All tables stacked into one, ids shifted: a single gather, or a single embedding_bag. exact: as of `TablePerField`."""

    def __init__(self, tables: Sequence[torch.Tensor], bags: Sequence[int] | None = None, *, exact: bool = False) -> None:
        super().__init__()
        self.bags = bags = list(bags or [1] * len(tables))
        self.exact = exact
        device = tables[0].device
        self.weight = nn.Parameter(stacked(tables), requires_grad=False)
        starts = torch.tensor([0, *(t.shape[0] for t in tables[:-1])]).cumsum(0)
        self.register_buffer("starts", starts.repeat_interleave(torch.tensor(bags)).to(device))
        if max(bags) > 1:
            first = torch.tensor([0, *bags[:-1]]).cumsum(0).to(device)
            rows = torch.arange(_MOST_ROWS, device=device)[:, None]
            self.register_buffer("bag_starts", (rows * sum(bags) + first).flatten())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        shifted = ids + self.starts
        if max(self.bags) == 1:
            return embedding(shifted, self.weight).flatten(1)
        if self.exact:
            return torch.cat([embedding(own, self.weight).float().sum(1) for own in shifted.split(self.bags, 1)], 1)
        starts = self.bag_starts[: len(ids) * len(self.bags)]
        return embedding_bag(shifted.flatten(), self.weight, starts, mode="sum").view(len(ids), -1)


def stacked(tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tables of one dim below one another: without a copy if they lie so."""
    ends = [t.data_ptr() + t.nbytes for t in tables]
    storages = {t.untyped_storage().data_ptr() for t in tables}
    if len(storages) == 1 and ends[:-1] == [t.data_ptr() for t in tables[1:]]:
        first = tables[0]
        return first.as_strided((sum(t.shape[0] for t in tables), first.shape[1]), first.stride())
    return torch.cat(list(tables))
