"""The ways in which a device may run a model: a graph, the plan of its steps and the operators bound to it. Warm-up keeps the
fastest for each bucket (`calibration`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.options import AUTO, REGIONS, WAVES
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.fusion.gates import fuse_gates
from dpiframe_core.graph.graph import JOINED, Graph
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.regions import group_regions
from dpiframe_core.graph.schedule import POLICIES, Plan
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.operators.context_shares import context_shares
from dpiframe_core.operators.cpu import CpuOperators
from dpiframe_core.operators.cuda import CudaOperators
from dpiframe_core.operators.towers import tower_graph
from dpiframe_core.operators.wave_operands import chain_graph
from kernels.dense.linear import DENSE_DTYPE, column_alignment, triton_builds

CHAIN, SHARES, TOWER, LOOSE = "chain", "shares", "tower", "loose regions"
# Computed by our kernels alone.
OWN_OPS = {
    JOINED, "lookup", "wave", "chain", "head", "fm", "cross_v1", "cross_v1_head", "dot", "cin", "attention", "field_attention",
    "mixture", "gru", "lstm", "tower",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class CpuProgram:
    """How a CPU runs a model. name: the scheduling policy."""

    name: str
    graph: Graph
    plan: Plan
    operators: CpuOperators


@dataclass(frozen=True, slots=True, eq=False)
class CudaProgram:
    """One way for a GPU to run a model.

    Attributes:
        name: "waves", "shares" (waves that compute what contexts share once), "tower" (waves whose narrow MLP is one launch),
            "chain", "regions", "loose regions" (whose attention is left to Inductor, too), or the scheduling policy of a graph
            whose modules run on streams.
        overlap: its kernels may start before the ones ahead of them are done (`kernels.runtime.launch.overlapping`).
    """

    name: str
    graph: Graph
    plan: Plan
    operators: CudaOperators
    overlap: bool

    def fits(self, rows: int) -> bool:
        """Whether it can run a bucket of so many rows, and may be the fastest there."""
        return self.operators.fits(rows)

    @property
    def operators_name(self) -> str:
        """Programs that share operators share what those chose."""
        return self.name if self.name in (WAVES, SHARES, CHAIN, TOWER, REGIONS, LOOSE) else "streams"


def cpu_program(
    graph: Graph, schema: FeatureSchema, store: EmbeddingStore, dense: Mapping[str, torch.Tensor], precision: str, policy: str
) -> CpuProgram:
    """On a CPU operators run one after the other, in the order of the policy: no wave, no stream is faster than another."""
    name = policy if policy in POLICIES else "breadth_first"
    return CpuProgram(name, graph, POLICIES[name](graph, 1), CpuOperators(graph, schema, store, dense, precision))


def cuda_programs(
    graph: Graph,
    schema: FeatureSchema,
    store: EmbeddingStore,
    dense: Mapping[str, torch.Tensor],
    precision: str,
    policy: str,
    max_streams: int,
    scales: Mapping[str, float] | None = None,
    loose: Graph | None = None,
) -> tuple[CudaProgram, ...]:
    """The programs to choose from: for "auto" waves, waves that compute once what rows of a context share, waves with a tower,
    a chain (which takes few rows), breadth-first streams, one stream, and where Inductor has a C compiler regions, if waves
    leave any; else the one that is named.

    scales: of the values in fp8, which only waves compute with. loose: the graph with less of it fused, whose regions may be
    faster than those of the other.
    """
    align = column_alignment(DENSE_DTYPE[precision])
    gated, graph = place(fuse_gates(graph), align), place(graph, align)
    programs: list[CudaProgram] = []
    if policy in (AUTO, WAVES) and torch.cuda.get_device_capability(store.device)[0] >= 8:
        waves = group_waves(graph if scales else gated)
        plan = POLICIES["sequential"](waves, 1)
        own = all(n.op in OWN_OPS for n in waves.nodes)
        programs.append(
            CudaProgram(WAVES, waves, plan, CudaOperators(waves, schema, store, dense, precision, scales or {}), own)
        )
        shares = context_shares(waves, schema, DENSE_DTYPE[precision])
        if policy == AUTO and not scales and shares is not None:
            operators = CudaOperators(waves, schema, store, dense, precision, shares=shares, known=programs[0].operators)
            programs.append(CudaProgram(SHARES, waves, plan, operators, own))
        tower = tower_graph(waves, precision, store.device)
        if policy == AUTO and own and tower is not None:
            operators = CudaOperators(tower, schema, store, dense, precision, known=programs[0].operators)
            programs.append(CudaProgram(TOWER, tower, POLICIES["sequential"](tower, 1), operators, own))
        chain = chain_graph(waves, precision)
        if policy == AUTO and not scales and chain is not None:
            plan = POLICIES["sequential"](chain, 1)
            programs.append(CudaProgram(CHAIN, chain, plan, CudaOperators(chain, schema, store, dense, precision), True))
    sources = (
        [(REGIONS, graph)] if policy in (AUTO, REGIONS) and leaves_operators(programs[0].graph if programs else None) else []
    )
    sources += [(LOOSE, place(loose, align))] if loose and policy == AUTO else []
    for name, source in sources:
        regions = group_waves(group_regions(source))
        if any(n.op == "region" for n in regions.nodes) and triton_builds():
            plan = POLICIES["breadth_first"](regions, max_streams)
            programs.append(CudaProgram(name, regions, plan, CudaOperators(regions, schema, store, dense, precision), False))
    if (policy in (WAVES, REGIONS) or scales) and programs:
        return tuple(programs)
    operators = CudaOperators(graph, schema, store, dense, precision)
    names = (policy,) if policy in POLICIES else ("breadth_first", "sequential")
    for name in names:
        plan = POLICIES[name](graph, max_streams)
        if name == "sequential" and any(p.plan.steps == plan.steps for p in programs):
            continue
        programs.append(CudaProgram(name, graph, plan, operators, False))
    return tuple(programs)


def leaves_operators(waves: Graph | None) -> bool:
    """Whether waves, if there are any, leave operators that regions may compute faster. Inductor takes 8 s to be there."""
    return waves is None or not all(n.op in OWN_OPS for n in waves.nodes)
