"""The programs of a bundle's model on a device: what an engine's options and precision make of its graph."""

from functools import partial

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.fp8 import FP8, check_fp8, measured_scales
from dpiframe_core.engine.options import AUTO, WAVES, EngineOptions
from dpiframe_core.engine.program import CpuProgram, CudaProgram, cpu_program, cuda_programs
from dpiframe_core.errors import ConfigError
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.waves import group_waves
from kernels.dense.linear import DENSE_DTYPE, column_alignment


def model_programs(
    bundle: Bundle, golden: RowBlock, graph: Graph, store: EmbeddingStore, precision: str, options: EngineOptions
) -> tuple[CpuProgram | CudaProgram, ...]:
    """The programs to choose from. fp8 first runs the `golden` rows in bfloat16, to find the scale of each value.

    Raises:
        ConfigError, InputError: fp8 with a policy, a device or a model that does not know it.
    """
    schema, policy = bundle.manifest.feature_schema, options.policy
    if store.device.type == "cpu":
        return (cpu_program(graph, schema, store, bundle.dense, precision, policy),)
    programs = partial(cuda_programs, graph, schema, store, bundle.dense, max_streams=options.max_streams)
    if precision != FP8:
        return programs(precision=precision, policy=policy)
    if policy not in (AUTO, WAVES):
        raise ConfigError(f"policy: got {policy!r} with precision fp8, expected {AUTO} or {WAVES}")
    check_fp8(group_waves(place(graph, column_alignment(DENSE_DTYPE[FP8]))), store.device)
    (measured,) = programs(precision="bf16", policy=WAVES)
    scales = measured_scales(measured, schema.block_layout, golden, store.device)
    return programs(precision=FP8, policy=WAVES, scales=scales)
