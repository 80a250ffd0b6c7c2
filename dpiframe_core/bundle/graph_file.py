"""An op graph as a bundle's graph.json: plain data of a closed set of operators, checked against the schema as it is read.

Nothing in it names code. A graph that would read beyond a value, a table or a parameter is refused before any kernel runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter, ValidationError

from dpiframe_core.bundle.manifest import GRAPH_FILE
from dpiframe_core.errors import BundleError, shown
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import Plain
from dpiframe_core.graph.graph import ACTIVATION_PARAMS, Graph, Node, Shape
from dpiframe_core.graph.recurrence import OPS, check_recurrence
from dpiframe_core.strict import first_fault

_GRAPH = TypeAdapter(Graph)
_ACTIVATIONS = (*get_args(Plain), "leaky_relu", *ACTIVATION_PARAMS)


def graph_json(graph: Graph) -> bytes:
    """The bytes of graph.json; what is left out has the default that `graph` gives it."""
    return _GRAPH.dump_json(graph, indent=1, exclude_defaults=True) + b"\n"


def read_graph(path: Path, schema: FeatureSchema, tasks: int) -> Graph:
    """Reads and checks a graph.json.

    Raises:
        BundleError: it is no graph, or one of its operators does not fit its inputs, its parameters or the schema.
    """
    return parse_graph(path.read_bytes(), schema, tasks)


def parse_graph(data: bytes, schema: FeatureSchema, tasks: int) -> Graph:
    """The graph of a file's bytes. Raises as `read_graph`."""
    try:
        graph = _GRAPH.validate_json(data, strict=True)
        _check(graph, schema, tasks)
    except ValidationError as error:
        raise BundleError(f"{GRAPH_FILE}: {first_fault(error)}") from None
    except ValueError as error:
        raise BundleError(f"{GRAPH_FILE}: {error}") from None
    return graph


def _check(graph: Graph, schema: FeatureSchema, tasks: int) -> None:
    names = [n.name for n in graph.nodes]
    if len(set(names)) != len(names):
        raise ValueError(f"got nodes {shown(sorted({n for n in names if names.count(n) > 1}))} twice, expected distinct names")
    for node in graph.nodes:
        try:
            _check_node(node, graph, schema)
        except (ValueError, KeyError) as error:
            raise ValueError(f"graph node {node.name}: {error}") from None
    if graph.widths[graph.output] != tasks:
        raise ValueError(f"graph output: got width {graph.widths[graph.output]}, expected {tasks}, a column a task")
    for what, given, used in (
        ("widths", graph.widths.keys(), {o for n in graph.nodes for o in n.outputs}),
        ("params", graph.params.keys(), {p for n in graph.nodes for p in n.params}),
    ):
        if unused := sorted(given - used):
            raise ValueError(f"{what}: got {shown(unused)} that no node has, expected none")


def _check_node(node: Node, graph: Graph, schema: FeatureSchema) -> None:
    check = _CHECKS.get(node.op)
    if check is None:
        raise ValueError(f"got op {node.op!r}, expected one of {', '.join(_CHECKS)}")
    if node.attrs.activation not in _ACTIVATIONS:
        raise ValueError(f"got activation {node.attrs.activation!r}, expected one of {', '.join(_ACTIVATIONS)}")
    if node.op != "activation" and node.attrs.activation != "identity":
        raise ValueError(f"got activation {node.attrs.activation!r} on op {node.op!r}, expected a node of its own for it")
    attrs = node.attrs
    strange = [f.name for f in fields(attrs) if f.name not in _ATTRS.get(node.op, ()) and getattr(attrs, f.name) != f.default]
    if strange:
        raise ValueError(f"got attributes {strange} on op {node.op!r}, expected those of its own")
    if node.op == "lookup":
        expected = _lookup_width(node, schema)
    else:
        expected = check(node, [graph.widths[i] for i in node.inputs], [graph.params[p] for p in node.params])
    if len(node.outputs) != 1 or graph.widths[node.outputs[0]] != expected:
        got = [graph.widths[o] for o in node.outputs]
        raise ValueError(f"got outputs of widths {got}, expected one of {expected}")


Check = Callable[[Node, Sequence[int], Sequence[Shape]], int]


def _lookup_width(node: Node, schema: FeatureSchema) -> int:
    if node.inputs or node.params or not node.attrs.concat:
        raise ValueError("got inputs, parameters or no sources, expected sources alone")
    for s in node.attrs.concat:
        if s.feature not in schema.columns:
            raise ValueError(f"got feature {s.feature!r}, expected one of the schema")
        f = schema.feature(s.feature)
        allowed = {name for name in (f.table, f.first_order_table) if name is not None} | (
            set() if f.is_id and f.pooling != "none" else {None}
        )
        if s.table not in allowed or s.width != schema.columns_read(s.feature, s.table):
            raise ValueError(
                f"got {s}, expected a table of the feature (or its number or mask) and the columns that it reads of it"
            )
    return sum(s.width for s in node.attrs.concat)


def _counted(inputs: int, params: int, width: Callable[[Sequence[int]], int], *, more: bool = False) -> Check:
    """`more`: that many inputs or more."""

    def check(node: Node, ins: Sequence[int], params_found: Sequence[Shape]) -> int:
        if len(ins) < inputs or (len(ins) > inputs and not more) or len(params_found) != params:
            raise ValueError(f"got {len(ins)} inputs and {len(params_found)} parameters, expected {inputs} and {params}")
        return width(ins)

    return check


def _equal(ins: Sequence[int]) -> int:
    if len(set(ins)) != 1:
        raise ValueError(f"got widths {list(ins)}, expected equal ones")
    return ins[0]


def _mul(ins: Sequence[int]) -> int:
    if ins[1] not in (1, ins[0]):
        raise ValueError(f"got widths {list(ins)}, expected equal ones, or 1 as the second")
    return ins[0]


def _linear(node: Node, ins: Sequence[int], params: Sequence[Shape]) -> int:
    if len(ins) != 1 or len(params) not in (1, 2):
        raise ValueError(f"got {len(ins)} inputs and {len(params)} parameters, expected 1 and 1 or 2")
    out = params[0][0] if len(params[0]) == 2 else 1
    if params[0] not in ((out, ins[0]), (ins[0],)) or (len(params) == 2 and params[1] != (out,)):
        raise ValueError(f"got parameters {list(params)}, expected [out, {ins[0]}] and perhaps [out]")
    return out


def _activation(node: Node, ins: Sequence[int], params: Sequence[Shape]) -> int:
    expected = [tuple(ins)] * len(ACTIVATION_PARAMS.get(node.attrs.activation, ()))
    if len(ins) != 1 or list(params) != expected:
        raise ValueError(f"got widths {list(ins)} and parameters {list(params)}, expected one and {expected}")
    return ins[0]


def _bias(node: Node, ins: Sequence[int], params: Sequence[Shape]) -> int:
    if len(ins) != 1 or list(params) != [tuple(ins)]:
        raise ValueError(f"got widths {list(ins)} and parameters {list(params)}, expected one and [width]")
    return ins[0]


def _fm(node: Node, ins: Sequence[int], params: Sequence[Shape]) -> int:
    a = node.attrs
    last = a.offset + a.fields * a.dim
    if len(ins) != 1 or params or min(a.offset, a.fields - 1, a.dim - 1) < 0 or last > ins[0]:
        raise ValueError(f"got columns {a.offset} to {last} of widths {list(ins)}, expected them within one value")
    return 1


def _aten(node: Node, ins: Sequence[int], params: Sequence[Shape]) -> int:
    assert node.attrs.aten is not None  # `Graph` has checked the call
    return prod(node.attrs.aten.sizes)


def _recurrence(node: Node, ins: Sequence[int], params: Sequence[Shape]) -> int:
    return check_recurrence(node.op, node.attrs.recurrence, node.attrs.offset, ins, params)


# Which attributes an operator has; the others are of none, or of fused operators, which files do not hold.
_ATTRS: dict[str, tuple[str, ...]] = {
    "lookup": ("concat",), "activation": ("activation", "slope"), "fm": ("offset", "fields", "dim"), "aten": ("aten",),
}  # fmt: skip
_ATTRS |= dict.fromkeys(OPS, ("recurrence", "offset"))
_CHECKS: dict[str, Check] = {
    "lookup": lambda node, ins, params: 0,  # needs the schema: `_lookup_width`
    "concat": _counted(2, 0, sum, more=True),
    "add": _counted(2, 0, _equal, more=True),
    "mul": _counted(2, 0, _mul),
    "sum": _counted(1, 0, lambda ins: 1),
    "linear": _linear,
    "bias": _bias,
    "activation": _activation,
    "fm": _fm,
    "aten": _aten,
    **dict.fromkeys(OPS, _recurrence),
}
