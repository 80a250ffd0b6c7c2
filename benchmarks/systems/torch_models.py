"""The same models in plain PyTorch, as their users write them: the baselines. ids int64[B, F] -> probabilities [B, 1]."""

from collections.abc import Mapping

import torch
from torch import nn

from benchmarks.systems.workload import Workload
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM


class TablePerField(nn.Module):
    """One nn.Embedding a field, looked up in a loop and concatenated."""

    def __init__(self, tables: list[torch.Tensor]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding.from_pretrained(t) for t in tables)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)


class Stacked(nn.Module):
    """All tables stacked into one, ids shifted: a single gather."""

    def __init__(self, tables: list[torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat(tables), requires_grad=False)
        starts = torch.tensor([0, *(t.shape[0] for t in tables[:-1])], device=tables[0].device).cumsum(0)
        self.register_buffer("starts", starts)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids + self.starts, self.weight).flatten(1)


class Model(nn.Module):
    """Wide&Deep, DeepFM, DCN or DCNv2 with a workload's weights, over embeddings by `lookup` (None: only `dense_part`)."""

    def __init__(self, w: Workload, lookup: type[TablePerField | Stacked] | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.architecture = a = w.architecture
        self.dtype = dtype
        device = next(iter(w.tables.values())).device
        self.fields, self.dim = len(w.schema.features), w.schema.tables[0].dim
        if lookup:
            self.embed = lookup(w.embedding_tables)
            if w.first_order_tables:
                self.wide = lookup(w.first_order_tables)
        self.deep = nn.ModuleList(_linear(w.dense, f"deep.{i}", device, dtype) for i in range(len(a.hidden_units)))
        if isinstance(a, DCNv2):
            self.cross = nn.ModuleList(_linear(w.dense, f"cross.{i}", device, dtype) for i in range(a.cross_layers))
        if isinstance(a, DCN):
            stacked = [[w.dense[f"cross.{i}.{kind}"] for i in range(a.cross_layers)] for kind in ("weight", "bias")]
            self.cross_w = nn.ParameterList(nn.Parameter(t.to(device, dtype), False) for t in stacked[0])
            self.cross_b = nn.ParameterList(nn.Parameter(t.to(device, dtype), False) for t in stacked[1])
        self.head = _linear(w.dense, "head", device, dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        e = self.embed(ids)
        return self.dense_part(e.to(self.dtype), self.wide(ids) if hasattr(self, "wide") else None)

    def dense_part(self, x: torch.Tensor, wide: torch.Tensor | None) -> torch.Tensor:
        """Everything after the lookups."""
        xl = h = x
        if isinstance(self.architecture, DCNv2):
            for layer in self.cross:
                xl = x * layer(xl) + xl
        if isinstance(self.architecture, DCN):
            for w, b in zip(self.cross_w, self.cross_b, strict=True):
                xl = x * (xl @ w)[:, None] + b + xl
        for layer in self.deep:
            h = torch.relu(layer(h))
        crossed = isinstance(self.architecture, DCN | DCNv2)
        logit = self.head(torch.cat([xl, h], 1) if crossed else h).float()
        if wide is not None:
            logit = logit + wide.float().sum(1, keepdim=True)
        if isinstance(self.architecture, DeepFM):
            v = x.view(-1, self.fields, self.dim)
            logit = logit + 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True).float()
        return torch.sigmoid(logit)


def _linear(dense: Mapping[str, torch.Tensor], name: str, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    weight = dense[f"{name}.weight"]
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight = nn.Parameter(weight.to(device, dtype), False)
    layer.bias = nn.Parameter(dense[f"{name}.bias"].to(device, dtype), False)
    return layer
