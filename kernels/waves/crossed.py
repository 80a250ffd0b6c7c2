"""What crossed_wgmma.cu takes by value: a cross layer that is alone in its wave."""

import ctypes
from collections.abc import Sequence

from kernels.runtime.tensor_map import WORDS
from kernels.waves.packed_weights import LinearWeights
from kernels.waves.wave_jobs import LinearJob
from kernels.waves.wave_tiles import CrossedTile

_Map = ctypes.c_uint64 * WORDS


class CrossedArguments(ctypes.Structure):
    """`Layer` of crossed_wgmma.cu, as long as the kernel's own: a multiple of the 64 bytes to which maps are aligned."""

    _fields_ = (
        *((name, _Map) for name in ("x", "weight", "x0", "xl", "out")),
        *((name, ctypes.c_void_p) for name in ("bias", "scale")),
        *((name, ctypes.c_float) for name in ("x0_scale", "xl_scale", "out_factor")),
        *((name, ctypes.c_int) for name in ("width", "depth", "tiles")),
        ("end", ctypes.c_char * 24),
    )


def crossed_arguments(maps: Sequence[object], job: LinearJob, weights: LinearWeights, tile: CrossedTile) -> CrossedArguments:
    """`maps`: of x, the weights, x0, xl and out."""
    width, depth = weights.weight.shape
    return CrossedArguments(
        *maps, weights.bias.data_ptr(), weights.scale.data_ptr(), job.x0_scale, job.xl_scale, 1 / job.out_scale,
        width, depth, -(-width // tile.columns),
    )  # fmt: skip
