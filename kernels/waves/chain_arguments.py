"""The structures that the chain kernel takes by value (chain.cu), field by field."""

import ctypes

from kernels.waves.wave_arguments import MAX_LOGITS

MAX_LINKS = 24  # of chain.cu


class LinkArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "shape", "x0", "xl", "out", "head")),
        *((name, ctypes.c_int) for name in ("linked", "x0_linked", "xl_linked", "x_ld", "x0_ld", "xl_ld", "out_ld")),
        *((name, ctypes.c_int) for name in ("width", "depth", "kind", "activation", "outer")),
        ("number", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("mixed_ld", "experts")),
        ("mixed", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("first", "slot")),
    )


class HeadArguments(ctypes.Structure):
    _fields_ = (
        ("partial", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("logits", ctypes.c_void_p * MAX_LOGITS),
        ("scores", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("steps", ctypes.c_int * MAX_LOGITS),
        ("linked", ctypes.c_int * MAX_LOGITS),
        ("slots", ctypes.c_int),
    )


class ChainArguments(ctypes.Structure):
    _fields_ = (("links", LinkArguments * MAX_LINKS), ("head", HeadArguments), ("count", ctypes.c_int))
