"""The lookup of a captured graph, and how a launch of it is told to read a batch's rows elsewhere.

CUDA changes the arguments of a kernel of a graph that is ready in 0.35 us (H200 host); what runs already keeps its own.
"""

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.runtime.launch import driver

log = logging.getLogger(__name__)
KERNEL = b"lookup"
ARGUMENTS = 25
PLACES = {"ids": 3, "numbers": 5}  # which of them say where the rows' are
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class RowReader:
    """A lookup of a graph, with the arguments that it is launched with from the next time it is set on.

    Attributes:
        node: a CUgraphNode, of a graph that outlives this. params: its arguments, of which those of `places` are our own.
        places: by name, as PLACES, where it reads them.
    """

    node: int
    params: _Kernel
    places: Mapping[str, ctypes.c_uint64]

    @property
    def given(self) -> tuple[int, int, int, int]:
        """For `replay_batches`: the node, and the addresses of params and places (0: it reads no such)."""
        ids, numbers = (ctypes.addressof(self.places[n]) if n in self.places else 0 for n in PLACES)
        return self.node, ctypes.addressof(self.params), ids, numbers


def row_reader(graph: int, places: Mapping[str, int], cuda: Any = None) -> RowReader | None:
    """The one lookup of a graph; None if there is none or several, it reads elsewhere, or this CUDA cannot tell.

    Args:
        graph: a cudaGraph_t. places: "ids" and "numbers", or those that there are: the addresses that it was launched with.
    """
    cuda = cuda or driver()
    try:
        lookups = [(node, params) for node in _nodes(cuda, graph) if (params := _kernel(cuda, node))]
    except AttributeError as missing:
        log.info("rows are copied into the batch, wherever they are: %s", missing)
        return None
    return _reader(*lookups[0], places) if len(lookups) == 1 else None


def _nodes(cuda: Any, graph: int) -> list[int]:
    count = ctypes.c_size_t()
    if cuda.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)):
        return []
    nodes = (ctypes.c_void_p * count.value)()
    failed = cuda.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    return [] if failed else [node for node in nodes if node]


def _kernel(cuda: Any, node: int) -> _Kernel | None:
    """What a node launches, if that is a lookup."""
    kind, params, name, node_ = ctypes.c_int(-1), _Kernel(), ctypes.c_char_p(), ctypes.c_void_p(node)
    if cuda.cuGraphNodeGetType(node_, ctypes.byref(kind)) or kind.value != _KERNEL_NODE:
        return None
    if cuda.cuGraphKernelNodeGetParams_v2(node_, ctypes.byref(params)) or not params.function or not params.arguments:
        return None
    failed = cuda.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(params.function))
    return params if not failed and name.value == KERNEL else None


def _reader(node: int, params: _Kernel, places: Mapping[str, int]) -> RowReader | None:
    """With arguments of its own for the places."""
    arguments = (ctypes.c_void_p * ARGUMENTS)(*(params.arguments[i] for i in range(ARGUMENTS)))
    own = {name: ctypes.c_uint64(address) for name, address in places.items()}
    for name, place in own.items():
        own_place = arguments[PLACES[name]]
        if not own_place or ctypes.c_uint64.from_address(own_place).value != place.value:
            return None
        arguments[PLACES[name]] = ctypes.addressof(place)
    params.arguments = arguments
    return RowReader(node, params, own)
