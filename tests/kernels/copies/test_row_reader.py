"""The lookup of a captured graph, whose arguments that say where its rows are become our own."""

import ctypes
import re
from pathlib import Path

import pytest

import kernels
from kernels.copies.row_reader import ARGUMENTS, KERNEL, PLACES, row_reader

IDS, NUMBERS = 0x7F00_0000_1000, 0x7F00_0000_2000
KERNEL_NODE, COPY_NODE = 0, 1


class Graph:
    """CUDA's driver for one graph of these nodes: names of kernels, or None (a copy). A lookup reads from IDS and NUMBERS."""

    def __init__(self, *names, refuses=(), functions=True):
        self.names, self.refuses, self.functions = names, refuses, functions
        self.values = [(ctypes.c_uint64 * ARGUMENTS)(*range(50, 50 + ARGUMENTS)) for _ in names]
        size, self.arguments = ctypes.sizeof(ctypes.c_uint64), []
        for values in self.values:
            values[3], values[5] = IDS, NUMBERS
            places = range(ctypes.addressof(values), ctypes.addressof(values) + ARGUMENTS * size, size)
            self.arguments.append((ctypes.c_void_p * ARGUMENTS)(*places))
        self.cuGraphGetNodes, self.cuGraphNodeGetType = self._nodes, self._type
        self.cuGraphKernelNodeGetParams_v2, self.cuFuncGetName = self._params, self._name

    def _code(self, name):
        return int(name in self.refuses)

    def _nodes(self, graph, nodes, count):
        assert graph.value == 5
        count._obj.value = len(self.names)
        for i in range(len(self.names) if nodes else 0):
            nodes[i] = 100 + i
        return self._code("nodes" if nodes else "count")

    def _type(self, node, kind):
        kind._obj.value = COPY_NODE if self.names[node.value - 100] is None else KERNEL_NODE
        return self._code("type")

    def _params(self, node, params):
        which = node.value - 100
        assert self.names[which] is not None
        params._obj.function = 1000 + which if self.functions else None  # of a library, which has no function
        params._obj.grid[0] = 7
        params._obj.arguments = self.arguments[which]
        return self._code("params")

    def _name(self, name, function):
        name._obj.value = self.names[function.value - 1000]
        return self._code("name")


def test_the_kernels_arguments_are_in_these_places():
    source = (Path(kernels.__file__).parent / "lookup/embedding.cu").read_text()
    given = re.search(r"\blookup\((.*?)\) \{", source, re.DOTALL)[1]
    names = [re.search(r"(\w+)$", each.strip())[1] for each in re.sub(r"//.*", "", given).split(",")]
    assert len(names) == ARGUMENTS
    assert {name: names[i] for name, i in PLACES.items()} == {"ids": "candidate_ids", "numbers": "candidate_numbers"}
    assert KERNEL == b"lookup"


@pytest.mark.parametrize("names", [(KERNEL,), (None, b"wave", KERNEL, b"lookup_more")])
@pytest.mark.parametrize("places", [{"ids": IDS, "numbers": NUMBERS}, {"ids": IDS}, {"numbers": NUMBERS}])
def test_a_lookup_takes_the_places_of_rows_from_us(names, places):
    graph, which = Graph(*names), names.index(KERNEL)
    reader = row_reader(5, places, graph)
    node, params, *own = reader.given
    assert (node, params) == (100 + which, ctypes.addressof(reader.params))
    assert reader.params.grid[0] == 7
    assert [bool(each) for each in own] == [name in places for name in PLACES]
    for each in filter(None, own):
        ctypes.c_uint64.from_address(each).value = 11
    want = [50 + i for i in range(ARGUMENTS)]
    want[3], want[5] = (11 if "ids" in places else IDS), (11 if "numbers" in places else NUMBERS)
    assert [ctypes.c_uint64.from_address(reader.params.arguments[i]).value for i in range(ARGUMENTS)] == want
    assert (graph.values[which][3], graph.values[which][5]) == (IDS, NUMBERS)  # the graph's own are as they were


@pytest.mark.parametrize(
    ("graph", "places"),
    [
        (Graph(), {"ids": IDS}),
        (Graph(b"wave", None), {"ids": IDS}),
        (Graph(KERNEL, b"wave", KERNEL), {"ids": IDS}),
        (Graph(KERNEL), {"ids": IDS + 64}),
        (Graph(KERNEL), {"ids": IDS, "numbers": IDS}),
        (Graph(KERNEL, functions=False), {"ids": IDS}),
        *[(Graph(KERNEL, refuses=(what,)), {"ids": IDS}) for what in ("nodes", "count", "type", "params", "name")],
        (object(), {"ids": IDS}),  # an older driver
    ],
)
def test_there_is_none_where_it_is_not_known_for_sure(graph, places):
    assert row_reader(5, places, graph) is None
