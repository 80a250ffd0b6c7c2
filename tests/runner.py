"""Runs a random model through graph, fusion, plan and a lane on either backend: the same test body for both."""

import numpy as np
import torch

from dpiframe_core.bundle.bundle import Golden, Provenance, read_bundle, write_bundle
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.program import CudaProgram, cuda_programs
from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.schedule import breadth_first
from dpiframe_core.models.build import build_graph
from dpiframe_core.operators.cpu import CpuOperators
from dpiframe_core.operators.cuda import CudaOperators
from kernels.dense.linear import DENSE_DTYPE, column_alignment
from tests import oracle


def table_tensors(schema, tables):
    """Tensors in the schema's dtypes (int8 ones for `oracle.make_scales`), and the float64 values that those hold."""
    scales, tensors, held = oracle.make_scales(schema), {}, {}
    for t in schema.tables:
        scale = scales.get(t.name)
        stored = tables[t.name] if scale is None else np.rint(tables[t.name] / scale).clip(-128, 127)
        tensors[t.name] = torch.from_numpy(stored).to(getattr(torch, t.dtype))
        held[t.name] = tensors[t.name].double().numpy() * (1 if scale is None else scale.astype(np.float64))
    return tensors, held


def scale_tensors(schema):
    return {name: torch.from_numpy(scale) for name, scale in oracle.make_scales(schema).items()}


def small_bundle(path, architecture, **schema_options):
    """Writes and reads a bundle of small tables whose golden scores come from the float64 oracle."""
    rng = np.random.default_rng(7)
    schema = oracle.make_schema(**schema_options)
    tensors, tables = table_tensors(schema, oracle.make_tables(schema, rng))
    dense = oracle.make_dense(schema, architecture, 1, rng)
    block = oracle.make_block(schema, 24, 5, rng)
    scores = oracle.scores(schema, architecture, dense, tables, block).astype(np.float32)
    write_bundle(
        path, name="small", version="1", architecture=architecture, feature_schema=schema,
        dense={k: torch.from_numpy(v) for k, v in dense.items()}, tables=tensors, vocabularies={},
        golden=Golden(block, scores), provenance=Provenance(source="test"), scales=scale_tensors(schema),
    )  # fmt: skip
    return read_bundle(path)


class Model:
    """One model on one device with one lane."""

    def __init__(self, schema, architecture, dense, tensors, device, *, precision="fp32", tasks=1, buckets=(1, 16, 64),
                 passes=tuple(PASSES), policy=breadth_first, plan=None, capture=True, waves=False, chain=False,
                 shares=False, tower=False):  # fmt: skip
        self.graph = fuse(build_graph(architecture, schema, tasks), passes)
        if device != "cpu":
            self.graph = place(self.graph, column_alignment(DENSE_DTYPE[precision]))
        self.plan = plan(self.graph) if plan else policy(self.graph, 4)
        weights = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in dense.items()}
        target = torch.device(device)
        store = EmbeddingStore(schema, tensors, target, scale_tensors(schema))
        if device == "cpu":
            self.operators = CpuOperators(self.graph, schema, store, weights, precision)
            self.lane = CpuLane(self.operators, self.plan, schema.block_layout, self.graph)
        else:
            if chain or shares or tower:
                programs = cuda_programs(self.graph, schema, store, weights, precision, "auto", 4)
                name = "chain" if chain else "shares" if shares else "tower"
                (program,) = (p for p in programs if p.name == name)
            elif waves:
                (program,) = cuda_programs(self.graph, schema, store, weights, precision, "waves", 4)
            else:
                operators = CudaOperators(self.graph, schema, store, weights, precision)
                program = CudaProgram("plan", self.graph, self.plan, operators, False)
            self._store = store
            self.lane = CudaLane([program], schema.block_layout, buckets, precision, target, {}, capture=capture)
        self.lane.prepare()

    @property
    def out_of_range(self):
        return self.operators.out_of_range if hasattr(self, "operators") else self._store.out_of_range

    def scores(self, *blocks):
        return self.lane.run(blocks).scores
