"""DIN: a user's history of items, each an item and its category, weighed by the candidate. The history is the context's."""

import torch
from torch import nn

from benchmarks.workloads.layers import Mlp, linear
from benchmarks.workloads.lookups import stacked
from benchmarks.workloads.workload import (
    Form,
    Workload,
    capped,
    categorical,
    drawn_dense,
    drawn_tables,
    shapes_of,
)
from dpiframe_core.features.schema import FeatureSchema, Table
from dpiframe_core.graph.architecture import DIN, TargetAttention

# Users, items and categories of Amazon Electronics as the paper has them, and three plain fields of a user.
SIZES = {"user": 192_403, "age": 16, "city": 512, "hour": 24, "item": 63_001, "category": 801}
USER = ("user", "age", "city", "hour")
TARGETS, HISTORIES = ("item", "category"), ("items", "categories")
ATTENTION = (80, 40)
HIDDEN = (200, 80)


def din(
    name: str,
    device: torch.device,
    *,
    length: int,
    seed: int = 0,
    dim: int = 32,
    most_rows: int | None = None,
    attention: tuple[int, ...] = ATTENTION,
    hidden_units: tuple[int, ...] = HIDDEN,
) -> Workload:
    """Histories of `length`; sigmoids in the attention, whose weights are not normalised."""
    unit = TargetAttention(targets=TARGETS, sequences=HISTORIES, hidden_units=attention, activation="sigmoid")
    a = DIN(attention=(unit,), hidden_units=hidden_units)
    history = {"scope": "context", "max_values": length, "pooling": "none", "missing_id": -1}
    features = [
        *(categorical(field, scope="context") for field in USER),
        *(categorical(field) for field in TARGETS),
        *(categorical(field, table, **history) for field, table in zip(HISTORIES, TARGETS, strict=True)),
    ]
    rows = capped(list(SIZES.values()), most_rows)
    tables = [Table(name=field, rows=n, dim=dim) for field, n in zip(SIZES, rows, strict=True)]
    schema = FeatureSchema(features=tuple(features), tables=tuple(tables))
    dense = drawn_dense(shapes_of(a, schema), seed)
    for kind in ("weight", "bias"):
        dense[f"attention.0.out.{kind}"] *= length**-0.5  # so that an interest is of an embedding's scale
    return Workload(name, a, schema, dense, drawn_tables(schema, device, seed), _written)


def _written(w: Workload, form: Form) -> nn.Module:
    return StackedModel(w, form) if form.stacked else Model(w, form)


class Model(nn.Module):
    """As users write it: the history of each row, [q, k, q - k, q * k] side by side, then the attention's MLP."""

    def __init__(self, w: Workload, form: Form) -> None:
        super().__init__()
        self.dtype = form.dtype
        self.tables = nn.ModuleDict({name: nn.Embedding.from_pretrained(t) for name, t in w.tables.items()})
        self.attention = Mlp(w.dense, "attention.0", w.device, form.dtype, nn.Sigmoid)
        self.out = linear(w.dense, "attention.0.out", w.device, form.dtype)
        self.deep = Mlp(w.dense, "deep", w.device, form.dtype)
        self.head = linear(w.dense, "head", w.device, form.dtype)

    def forward(self, target: torch.Tensor, context: torch.Tensor, request_of_row: torch.Tensor | None = None) -> torch.Tensor:
        rows = len(target)
        own = context.expand(rows, -1) if request_of_row is None else context[request_of_row]
        users, history = own[:, : len(USER)], own[:, len(USER) :]
        user = torch.cat([self.tables[name](users[:, i]) for i, name in enumerate(USER)], 1)
        q = torch.cat([self.tables[name](target[:, i]) for i, name in enumerate(TARGETS)], 1).to(self.dtype)
        ids = history.view(rows, len(TARGETS), -1)
        k = torch.cat([self.tables[name](ids[:, i].clamp(min=0)) for i, name in enumerate(TARGETS)], 2).to(self.dtype)
        queries = q[:, None].expand_as(k)
        weights = self.out(self.attention(torch.cat([queries, k, queries - k, queries * k], 2)))
        weights = weights * (ids[:, 0] >= 0)[:, :, None]
        x = torch.cat([user.to(self.dtype), q, (weights * k).sum(1)], 1)
        return torch.sigmoid(self.head(self.deep(x)).float())


class StackedModel(nn.Module):
    """A context's embeddings are read, and its keys multiplied, once; the first layer is split by its columns:

    W [q, k, q - k, q * k] = (W_q + W_d) q + (W_k - W_d) k + W_p (q * k).
    """

    def __init__(self, w: Workload, form: Form) -> None:
        super().__init__()
        self.dtype = form.dtype
        self.weight = nn.Parameter(stacked(list(w.tables.values())), requires_grad=False)
        sizes = [t.rows for t in w.schema.tables]
        first = {name: sum(sizes[:i]) for i, name in enumerate(SIZES)}
        starts = torch.tensor([first[name] for name in SIZES], device=w.device)
        self.register_buffer("user_starts", starts[: len(USER)])
        self.register_buffer("target_starts", starts[len(USER) :])
        self.register_buffer("history_starts", starts[len(USER) :, None])
        dense = dict(w.dense)
        wq, wk, wd, wp = dense.pop("attention.0.0.weight").chunk(4, 1)
        split = {"q.weight": wq + wd, "q.bias": dense.pop("attention.0.0.bias"), "k.weight": wk - wd, "p.weight": wp}
        self.of_query = linear(split, "q", w.device, form.dtype)
        self.of_key, self.of_product = (linear(split, n, w.device, form.dtype, bias=False) for n in "kp")
        later = {f"attention.{int(n.split('.')[2]) - 1}.{n.split('.')[3]}": v for n, v in dense.items() if _is_layer(n)}
        self.attention = Mlp(later, "attention", w.device, form.dtype, nn.Sigmoid)
        self.out = linear(dense, "attention.0.out", w.device, form.dtype)
        self.deep = Mlp(dense, "deep", w.device, form.dtype)
        self.head = linear(dense, "head", w.device, form.dtype)

    def forward(self, target: torch.Tensor, context: torch.Tensor, request_of_row: torch.Tensor | None = None) -> torch.Tensor:
        rows, contexts = len(target), len(context)
        user = self._embedded(context[:, : len(USER)] + self.user_starts).flatten(1)
        q = self._embedded(target + self.target_starts).flatten(1)
        ids = context[:, len(USER) :].view(contexts, len(TARGETS), -1)
        k = self._embedded(ids.clamp(min=0) + self.history_starts).transpose(1, 2).flatten(2)  # [contexts, length, d]
        from_key, known = self.of_key(k), (ids[:, 0] >= 0).to(self.dtype)
        if request_of_row is None:
            user = user.expand(rows, -1)
        else:
            user, k, from_key, known = (v.index_select(0, request_of_row) for v in (user, k, from_key, known))
        h = torch.sigmoid(self.of_product(q[:, None] * k) + from_key + self.of_query(q)[:, None])
        weights = self.out(self.attention(h))[:, :, 0] * known
        interest = weights @ k[0] if request_of_row is None else torch.bmm(weights[:, None], k)[:, 0]
        return torch.sigmoid(self.head(self.deep(torch.cat([user, q, interest], 1))).float())

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight).to(self.dtype)


def _is_layer(name: str) -> bool:
    return name.startswith("attention.0.") and name.split(".")[2].isdigit()
