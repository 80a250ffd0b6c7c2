"""One model as it is measured: its schema, its weights on a device, and how it is written in plain PyTorch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from torch import nn

from dpiframe_core.bundle.bundle import Bundle, Golden, GoldenSpec, Manifest, Provenance
from dpiframe_core.bundle.graph_file import graph_json
from dpiframe_core.bundle.manifest import GRAPH_FILE, bundle_files
from dpiframe_core.embedding.quantize import quantize
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table
from dpiframe_core.graph.architecture import Architecture
from dpiframe_core.graph.graph import Graph
from dpiframe_core.models.build import build_graph

# Published vocabulary sizes of Criteo Kaggle's 26 categorical fields, and its 13 numeric fields in 64 buckets each.
CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4,
    7046547, 18, 15, 286181, 105, 142572, *[64] * 13,
)  # fmt: skip
_VECTOR = 16  # bytes that the lookup reads at once
_PART = 1 << 21  # rows that are quantized at a time


@dataclass(frozen=True, slots=True)
class Form:
    """How a model is written in PyTorch.

    Attributes:
        stacked: all tables in one, and what else a good engineer does; else a table a field, as its users write it.
        dtype: of the dense layers.
        exact: sums of float16 rows are taken, and left, in float32.
    """

    stacked: bool
    dtype: torch.dtype = torch.float32
    exact: bool = False


SOURCE = Form(stacked=False, exact=True)  # in strict float32: what all systems are held against


@dataclass(frozen=True, eq=False)
class Workload:
    """One model with random weights of a trained one's scale.

    Attributes:
        dense: parameter name -> float32, in host memory.
        tables: name -> [rows, dim] on the device (`drawn_tables`).
        written: the model in PyTorch, in a form. Its inputs are those of `PeerInputs`, its output float32[rows, 1].
        graph: of a model that came through `compile`; None: the architecture tells it.
        facts: what its records say besides.
        quantized: whether the engine reads the tables as int8. The source model and all peers read `tables`.
    """

    name: str
    architecture: Architecture
    schema: FeatureSchema
    dense: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    written: Callable[["Workload", Form], nn.Module]
    graph: Graph | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    quantized: bool = False

    def module(self, form: Form) -> nn.Module:
        """The model in plain PyTorch, on the device of the tables."""
        return self.written(self, form).eval()

    @property
    def device(self) -> torch.device:
        return next(iter(self.tables.values())).device

    @property
    def has_contexts(self) -> bool:
        """Whether rows share features: then a cell is also of so many contexts."""
        return any(f.scope == "context" for f in self.schema.features)

    @property
    def embedding_tables(self) -> list[torch.Tensor]:
        """A table a feature that has one, in the schema's order."""
        return [self.tables[f.table] for f in self.schema.features if f.table]

    @property
    def first_order_tables(self) -> list[torch.Tensor]:
        """The same of dim 1; none for a model without a first-order term."""
        return [self.tables[f.first_order_table] for f in self.schema.features if f.first_order_table]

    def bundle(self, golden: Golden) -> Bundle:
        """The same weights as the bundle that the engine loads (nothing is written to disk)."""
        schema, tables, scales = self.schema, dict(self.tables), dict[str, torch.Tensor]()
        if self.quantized:
            schema, tables, scales = self._int8
        names = [*bundle_files(schema), *([GRAPH_FILE] if self.graph else [])]
        manifest = Manifest(
            name=self.name, version="benchmark", architecture=self.architecture, schema=schema,
            files=dict.fromkeys(names, "0" * 64),
            provenance=Provenance(source="benchmarks"), golden=GoldenSpec(rows=golden.block.rows),
        )  # fmt: skip
        told = manifest.model_dump_json().encode() + (graph_json(self.graph) if self.graph else b"")
        fingerprint = sha256(told).hexdigest()  # caches of what warm-up learns go by it
        return Bundle(
            Path("benchmark"), manifest, dict(self.dense), tables, {}, golden, None, fingerprint, scales, graph=self.graph
        )

    @cached_property
    def _int8(self) -> tuple[FeatureSchema, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Schema, tables and scales as a user who asks for int8 has them. Made once: a workload's engines share them."""
        stored = {name: quantize(table, _PART) for name, table in self.tables.items()}
        tables = tuple(Table(name=t.name, rows=t.rows, dim=t.dim, dtype="int8") for t in self.schema.tables)
        schema = FeatureSchema(features=self.schema.features, tables=tables)
        return schema, {name: own for name, (own, _) in stored.items()}, {name: scale for name, (_, scale) in stored.items()}


def categorical(name: str, table: str | None = None, first: str | None = None, **more: object) -> Categorical:
    """A feature whose raw integers are the ids; its table is named as it is unless told otherwise."""
    given = {"oov_id": 0, **more}
    return Categorical(name=name, values="int", encoder=Identity(), table=table or name, first_order_table=first, **given)  # type: ignore[arg-type]


def schema_of(
    sizes: Sequence[int],
    dim: int,
    *,
    first_order: bool = False,
    dtype: str = "float32",
    bag: int | Sequence[int] = 1,
    of_context: int = 0,
) -> FeatureSchema:
    """One identity feature a size, with `bag` ids each, or so many of each, summed. The first `of_context` are of a context."""
    bags = [bag] * len(sizes) if isinstance(bag, int) else bag
    tables = [Table(name=f"C{i}", rows=n, dim=dim, dtype=dtype) for i, n in enumerate(sizes)]  # type: ignore[arg-type]
    if first_order:
        tables += [Table(name=f"w{i}", rows=n, dim=1) for i, n in enumerate(sizes)]
    features = [
        categorical(
            f"C{i}", first=f"w{i}" if first_order else None, max_values=n, scope="context" if i < of_context else "candidate"
        )
        for i, n in enumerate(bags)
    ]  # fmt: skip
    return FeatureSchema(features=tuple(features), tables=tuple(tables))


def capped(sizes: Sequence[int], most_rows: int | None) -> tuple[int, ...]:
    """Rows of each table, none above `most_rows`."""
    return tuple(min(n, most_rows or n) for n in sizes)


def drawn_tables(schema: FeatureSchema, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Random tables. Those of one dim and dtype lie side by side in one allocation: stacked they cost no second copy."""
    generator = torch.Generator(device).manual_seed(seed)
    tables: dict[str, torch.Tensor] = {}
    for dim, dtype in dict.fromkeys((t.dim, t.dtype) for t in schema.tables):
        alike = [t for t in schema.tables if (t.dim, t.dtype) == (dim, dtype)]
        kind: torch.dtype = getattr(torch, dtype)
        together = dim * kind.itemsize % _VECTOR == 0  # else a table's first row would not be aligned
        for group in [alike] if together else [[t] for t in alike]:
            drawn = torch.empty(sum(t.rows for t in group), dim, dtype=kind, device=device).normal_(0, 0.1, generator=generator)
            tables |= zip((t.name for t in group), drawn.split([t.rows for t in group]), strict=True)
    return tables


def drawn_dense(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, torch.Tensor]:
    """Random parameters that keep every layer's output near its input's scale."""
    generator, dense = torch.Generator().manual_seed(seed), {}
    for parameter, shape in shapes.items():
        scale = 0.1 if len(shape) == 1 and parameter.endswith("bias") else shape[-1] ** -0.5
        dense[parameter] = torch.randn(prod(shape), generator=generator).view(*shape) * scale
    return dense


def shapes_of(architecture: Architecture, schema: FeatureSchema) -> Mapping[str, Sequence[int]]:
    """Names and shapes of a model's dense parameters."""
    return build_graph(architecture, schema).params
