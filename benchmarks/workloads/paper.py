"""Models over Criteo Kaggle's fields, one id each: the paper's four, forms of DCN-V2, and xDeepFM."""

from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.workloads.layers import CrossNetwork, Mlp, linear
from benchmarks.workloads.lookups import Stacked, TablePerField
from benchmarks.workloads.workload import (
    CRITEO,
    Form,
    Workload,
    capped,
    drawn_dense,
    drawn_tables,
    schema_of,
    shapes_of,
)
from dpiframe_core.graph.architecture import DCN, Architecture, DCNv2, DeepFM, WideDeep, XDeepFM

HIDDEN = (1024, 512, 256)
FOUR = WideDeep | DeepFM | DCN | DCNv2  # what `Model` is written for
ARCHITECTURES: dict[str, Architecture] = {
    "wide_deep": WideDeep(hidden_units=HIDDEN),
    "deepfm": DeepFM(hidden_units=HIDDEN),
    "dcn": DCN(cross_layers=6, hidden_units=HIDDEN),
    "dcnv2": DCNv2(cross_layers=3, hidden_units=HIDDEN),
    "dcnv2-stacked": DCNv2(structure="stacked", cross_layers=3, hidden_units=HIDDEN),
    "dcnv2-low-rank": DCNv2(cross_layers=3, rank=64, hidden_units=HIDDEN),
    "dcnv2-mixture": DCNv2(cross_layers=3, rank=64, experts=4, hidden_units=HIDDEN),
    "xdeepfm": XDeepFM(cin_units=(128, 128), hidden_units=(400, 400)),
}


def paper_model(
    name: str,
    device: torch.device,
    *,
    seed: int = 0,
    dim: int = 16,
    sizes: Sequence[int] = CRITEO,
    most_rows: int | None = None,
    architecture: Architecture | None = None,
    of_context: int = 0,
) -> Workload:
    """A model of `ARCHITECTURES`, or a given one of those kinds. sizes: rows of each field's table. of_context: how many of the
    fields, the first ones, are a context's.
    """
    a = architecture or ARCHITECTURES[name]
    schema = schema_of(
        capped(sizes, most_rows), dim, first_order=isinstance(a, WideDeep | DeepFM | XDeepFM), of_context=of_context
    )
    dense = drawn_dense(shapes_of(a, schema), seed)
    if isinstance(a, DCNv2) and a.experts:
        for layer in range(a.cross_layers):  # experts see nothing of one another
            dense[f"cross.{layer}.c.weight"] *= torch.block_diag(*[torch.ones(a.rank, a.rank)] * a.experts)  # type: ignore[list-item]
    return Workload(name, a, schema, dense, drawn_tables(schema, device, seed), written)


def written(w: Workload, form: Form) -> nn.Module:
    lookup = Stacked if form.stacked else TablePerField
    model = XDeepFMModel(w, lookup, form) if isinstance(w.architecture, XDeepFM) else Model(w, lookup, form.dtype)
    return OfContexts(model) if w.has_contexts else model


class OfContexts(nn.Module):
    """A model whose first fields are of each row's context: their ids are given to every row."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, own: torch.Tensor, context: torch.Tensor, request_of_row: torch.Tensor | None = None) -> torch.Tensor:
        shared = context.expand(len(own), -1) if request_of_row is None else context[request_of_row]
        return self.model(torch.cat([shared, own], 1))


class Model(nn.Module):
    """Wide&Deep, DeepFM, DCN or DCNv2, over embeddings by `lookup` (None: only `dense_part`)."""

    def __init__(self, w: Workload, lookup: type[TablePerField | Stacked] | None, dtype: torch.dtype) -> None:
        super().__init__()
        a, device = w.architecture, w.device
        assert isinstance(a, FOUR)
        self.architecture, self.dtype = a, dtype
        self.fields, self.dim = len(w.schema.features), w.schema.tables[0].dim
        if lookup:
            self.embed = lookup(w.embedding_tables)
            if w.first_order_tables:
                self.wide = lookup(w.first_order_tables)
        self.deep = Mlp(w.dense, "deep", device, dtype)
        if isinstance(a, DCNv2):
            self.cross = CrossNetwork(w.dense, a.cross_layers, device, dtype, experts=a.experts)
        if isinstance(a, DCN):
            stacked = [[w.dense[f"cross.{i}.{kind}"] for i in range(a.cross_layers)] for kind in ("weight", "bias")]
            self.cross_w = nn.ParameterList(nn.Parameter(t.to(device, dtype), False) for t in stacked[0])
            self.cross_b = nn.ParameterList(nn.Parameter(t.to(device, dtype), False) for t in stacked[1])
        self.head = linear(w.dense, "head", device, dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        e = self.embed(ids)
        return self.dense_part(e.to(self.dtype), self.wide(ids) if hasattr(self, "wide") else None)

    def dense_part(self, x: torch.Tensor, wide: torch.Tensor | None) -> torch.Tensor:
        """Everything after the lookups."""
        logit = self.head(self._joined(x)).float()
        if wide is not None:
            logit = logit + wide.float().sum(1, keepdim=True)
        if isinstance(self.architecture, DeepFM):
            v = x.view(-1, self.fields, self.dim)
            logit = logit + 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True).float()
        return torch.sigmoid(logit)

    def _joined(self, x: torch.Tensor) -> torch.Tensor:
        """What the head reads."""
        a = self.architecture
        if isinstance(a, DCNv2):
            crossed = self.cross(x)
            return self.deep(crossed) if a.structure == "stacked" else torch.cat([crossed, self.deep(x)], 1)
        if isinstance(a, DCN):
            xl = x
            for w, b in zip(self.cross_w, self.cross_b, strict=True):
                xl = x * (xl @ w)[:, None] + b + xl
            return torch.cat([xl, self.deep(x)], 1)
        return self.deep(x)


class XDeepFMModel(nn.Module):
    """CIN, MLP and first-order terms. As users write it: an outer product [rows, h * m, dim], and a product with it a row (a
    Conv1d of width 1 is the same, but takes tf32 whatever it is told). Stacked: the outer product laid out as [rows * dim,
    h * m], which makes each layer one matrix product.
    """

    def __init__(self, w: Workload, lookup: type[TablePerField | Stacked], form: Form) -> None:
        super().__init__()
        assert isinstance(w.architecture, XDeepFM)
        self.dtype, self.stacked = form.dtype, form.stacked
        self.fields, self.dim = len(w.schema.features), w.schema.tables[0].dim
        self.embed, self.wide = lookup(w.embedding_tables), lookup(w.first_order_tables)
        self.deep = Mlp(w.dense, "deep", w.device, form.dtype)
        layers = range(len(w.architecture.cin_units))
        self.maps = nn.ModuleList(linear(w.dense, f"cin.{k}", w.device, form.dtype) for k in layers)
        self.head = linear(w.dense, "head", w.device, form.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).to(self.dtype)
        v = x.view(-1, self.fields, self.dim)
        pooled = self._by_layer(v) if self.stacked else self._by_row(v)
        logit = self.head(torch.cat([pooled, self.deep(x)], 1)).float()
        return torch.sigmoid(logit + self.wide(ids).float().sum(1, keepdim=True))

    def _by_row(self, x0: torch.Tensor) -> torch.Tensor:
        xk, pooled = x0, []
        for layer in self.maps:
            z = torch.einsum("bhd,bmd->bhmd", xk, x0).flatten(1, 2)
            xk = torch.matmul(layer.weight, z) + layer.bias[:, None]
            pooled.append(xk.sum(2))
        return torch.cat(pooled, 1)

    def _by_layer(self, v: torch.Tensor) -> torch.Tensor:
        x0 = v.transpose(1, 2).reshape(-1, self.fields)
        xk, pooled = x0, []
        for layer in self.maps:
            xk = layer((xk[:, :, None] * x0[:, None]).flatten(1))
            pooled.append(xk.view(-1, self.dim, xk.shape[1]).sum(1))
        return torch.cat(pooled, 1)
