"""Serving in fp8 (e4m3): which programs can, and the scale of each value, found by a run in bfloat16 on the golden rows."""

from collections.abc import Mapping, Sequence

import torch

from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.program import CudaProgram
from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.graph.graph import JOINED, Graph
from dpiframe_core.graph.placement import Matrix, matrices

FP8 = "fp8"
OPS = (JOINED, "lookup", "wave", "head")  # the kernels that know of scales
MOST = 448.0  # the largest number of e4m3
HEADROOM = 4.0  # over the golden rows' largest magnitude; costs nothing but the smallest numbers, as e4m3 has an exponent


def check_fp8(graph: Graph, device: torch.device) -> None:
    """Raises InputError: the device does not multiply fp8, or the graph (of waves) has an operator that does not know it."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise InputError("precision", FP8, "fp32, tf32 or bf16 on this GPU, which does not multiply fp8 (sm_89 on)")
    for node in graph.nodes:
        if node.op not in OPS:
            raise InputError("precision", FP8, f"fp32, tf32 or bf16 for a model with {node.name} ({node.op})")


def measured_scales(program: CudaProgram, layout: BlockLayout, block: RowBlock, device: torch.device) -> dict[str, float]:
    """The scale of every value of a bfloat16 program in its dense dtype: value = e4m3 number * scale."""
    lane = CudaLane((program,), layout, (block.rows,), "bf16", device, {}, capture=False)
    try:
        return scales_of(lane.value_ranges(block), matrices(program.graph))
    finally:
        lane.close()


def scales_of(ranges: Mapping[str, float], together: Sequence[Matrix] = ()) -> dict[str, float]:
    """Scales for values of these largest magnitudes; 1 for a value that is all zero. Values of a matrix share one: who reads
    several of them at once tells no columns apart, and a lookup writes all of it by one.
    """
    most = dict(ranges)
    for matrix in together:
        own = [value for value in matrix.spans if value in most]
        most |= dict.fromkeys(own, max((most[value] for value in own), default=0.0))
    return {value: largest * HEADROOM / MOST if largest > 0 else 1.0 for value, largest in most.items()}
