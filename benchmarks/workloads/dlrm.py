"""DLRM over Criteo Kaggle's 26 tables and 13 numbers, and MLPerf's DLRM-DCNv2: tables of half a terabyte's log, in bags."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from benchmarks.workloads.layers import CrossNetwork, Mlp, linear
from benchmarks.workloads.lookups import Stacked, TablePerField
from benchmarks.workloads.workload import (
    CRITEO,
    Form,
    Workload,
    capped,
    categorical,
    drawn_dense,
    drawn_tables,
    shapes_of,
)
from dpiframe_core.features.schema import FeatureSchema, Numeric, Table
from dpiframe_core.graph.architecture import DLRM, DLRMDCNv2

NUMBERS = 13
KAGGLE = DLRM(bottom_units=(512, 256, 64), hidden_units=(512, 512, 256))
# MLPerf Inference's dlrm-v2-99: rows of Criteo 1TB's tables, none above 40 million, and ids of each field.
MLPERF = DLRMDCNv2(bottom_units=(512, 256, 128), cross_layers=3, rank=512, hidden_units=(1024, 1024, 512, 256))
MLPERF_SIZES = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4,
    976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def dlrm(
    name: str,
    device: torch.device,
    *,
    seed: int = 0,
    sizes: Sequence[int] = CRITEO[:26],
    most_rows: int | None = None,
    architecture: DLRM = KAGGLE,
) -> Workload:
    """One id a field, float32 tables."""
    bags = (1,) * len(sizes)
    return _workload(name, architecture, capped(sizes, most_rows), bags, "float32", device, seed)


def mlperf(
    name: str,
    device: torch.device,
    *,
    seed: int = 0,
    sizes: Sequence[int] = MLPERF_SIZES,
    bags: Sequence[int] = MLPERF_BAGS,
    most_rows: int | None = None,
    architecture: DLRMDCNv2 = MLPERF,
    quantized: bool = False,
) -> Workload:
    """Bags of ids, summed; float16 tables, 52 GB of them unless `most_rows` caps each. quantized: int8 ones for the engine."""
    w = _workload(name, architecture, capped(sizes, most_rows), bags, "float16", device, seed)
    facts = {**w.facts, "table_bytes": sum(t.rows * t.dim for t in w.schema.tables)} if quantized else w.facts
    return replace(w, quantized=quantized, facts=facts)


def _workload(
    name: str,
    a: DLRM | DLRMDCNv2,
    sizes: Sequence[int],
    bags: Sequence[int],
    dtype: str,
    device: torch.device,
    seed: int,
) -> Workload:
    dim = a.bottom_units[-1]
    tables = [Table(name=f"C{i}", rows=n, dim=dim, dtype=dtype) for i, n in enumerate(sizes)]  # type: ignore[arg-type]
    features = [Numeric(name=f"I{i}") for i in range(NUMBERS)]
    features += [categorical(f"C{i}", max_values=bag) for i, bag in enumerate(bags)]  # type: ignore[misc]
    schema = FeatureSchema(features=tuple(features), tables=tuple(tables))
    facts = {"largest_table_rows": max(sizes), "table_bytes": sum(t.bytes_used for t in tables)}
    dense = drawn_dense(shapes_of(a, schema), seed)
    return Workload(name, a, schema, dense, drawn_tables(schema, device, seed), Model, facts=facts)


class Model(nn.Module):
    """A bottom MLP on the numbers; dots of all pairs, or cross layers; a top MLP."""

    def __init__(self, w: Workload, form: Form) -> None:
        super().__init__()
        a, dtype = w.architecture, form.dtype
        assert isinstance(a, DLRM | DLRMDCNv2)
        bags = [f.max_values for f in w.schema.features if f.table]
        self.dtype, self.dim = dtype, a.bottom_units[-1]
        self.embed = (Stacked if form.stacked else TablePerField)(w.embedding_tables, bags, exact=form.exact)
        self.bottom, self.deep = (Mlp(w.dense, prefix, w.device, dtype) for prefix in ("bottom", "deep"))
        self.head = linear(w.dense, "head", w.device, dtype)
        if isinstance(a, DLRMDCNv2):
            self.cross = CrossNetwork(w.dense, a.cross_layers, w.device, dtype)
        else:
            count = len(bags) + 1
            below = torch.tensor([i * count + j for i in range(count) for j in range(i + a.self_interaction)])
            self.register_buffer("below", below.to(w.device))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        z0 = self.bottom(numbers.to(self.dtype))
        z = torch.cat([z0, self.embed(ids).to(self.dtype)], 1)
        if hasattr(self, "cross"):
            x = self.cross(z)
        else:
            vectors = z.view(len(z), -1, self.dim)
            dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
            x = torch.cat([z0, dots.index_select(1, self.below)], 1)
        return torch.sigmoid(self.head(self.deep(x)).float())
