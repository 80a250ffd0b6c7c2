"""Workloads that come through `dpiframe_core.compile`: a plain module is the peer, and the source of our bundle's graph."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import nn

from benchmarks.workloads.lookups import Stacked, TablePerField
from benchmarks.workloads.modules import AutoInt, FinalMLP, MaskNet
from benchmarks.workloads.workload import CRITEO, Form, Workload, capped, drawn_tables, schema_of
from dpiframe_core import compile as compile_module
from dpiframe_core.graph.architecture import GraphFile

MODULES: Mapping[str, Callable[[int, int], nn.Module]] = {"autoint": AutoInt, "masknet": MaskNet, "finalmlp": FinalMLP}
_ROWS = 8  # of the example, and of the tables that the module is compiled with: its graph knows no table's size


def compiled_model(
    name: str,
    device: torch.device,
    *,
    seed: int = 0,
    dim: int = 16,
    sizes: Sequence[int] = CRITEO,
    most_rows: int | None = None,
    module: nn.Module | None = None,
) -> Workload:
    """A module of `MODULES`, or a given one, over one id a field."""
    dense = randomised(module or MODULES[name](len(sizes), dim), seed)
    small = schema_of((_ROWS,) * len(sizes), dim)
    ids = torch.randint(0, _ROWS, (len(sizes), _ROWS), generator=torch.Generator().manual_seed(seed))
    example = dict(zip((f.name for f in small.features), ids, strict=True))
    compiled = compile_module(_OfColumns(list(example), dim, dense), small, example, logits=True)
    schema = schema_of(capped(sizes, most_rows), dim)
    tables = drawn_tables(schema, device, seed)

    def written(w: Workload, form: Form) -> nn.Module:
        return Model(w, form, dense)

    return Workload(name, GraphFile(), schema, compiled.dense, tables, written, graph=compiled.graph)


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """The module with weights that keep every layer's output near its input's scale, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            is_scale = p.ndim == 1 and name.endswith("weight")
            p.copy_(drawn * 0.1 + is_scale if p.ndim == 1 else drawn * p.shape[-1] ** -0.5)
    return module.eval().requires_grad_(False)


class Model(nn.Module):
    """The module behind a lookup, its layers in a form's dtype."""

    def __init__(self, w: Workload, form: Form, dense: nn.Module) -> None:
        super().__init__()
        self.embed = (Stacked if form.stacked else TablePerField)(w.embedding_tables)
        self.dense = deepcopy(dense).to(w.device, form.dtype)
        self.dtype, self.dim = form.dtype, w.schema.tables[0].dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        e = self.embed(ids).to(self.dtype)
        return torch.sigmoid(self.dense(e.view(len(ids), -1, self.dim)).float())


class _OfColumns(nn.Module):
    """The module as `compile` takes it: a column of ids by name, a small table each."""

    def __init__(self, names: Sequence[str], dim: int, dense: nn.Module) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(_ROWS, dim) for name in names})
        self.dense = dense

    def forward(self, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.dense(torch.stack([table(x[name]) for name, table in self.tables.items()], 1))
        return logits
