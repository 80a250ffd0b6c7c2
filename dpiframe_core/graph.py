"""The op graph of a model: what is computed from what, nothing executable. Plain frozen data, checked as it is built.

Every value is `float[B, width]` with B the rows of a batch, so a shape is one number. Tensors enter through `lookup` nodes
alone (the batch's ids and numbers are implicit), parameters by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from pydantic import ConfigDict, with_config

from dpiframe_core.aten import AtenCall, check_call
from dpiframe_core.schema import FeatureSchema

Shape = tuple[int, ...]
_STRICT = with_config(ConfigDict(extra="forbid"))  # for `graphfile`, which reads these from JSON


@_STRICT
@dataclass(frozen=True, slots=True)
class Source:
    """One feature read through one table (or, with `table` None, a number copied as it is). `width` columns."""

    feature: str
    table: str | None
    width: int


@_STRICT
@dataclass(frozen=True, slots=True)
class Attrs:
    """The few constants that some ops need; which op reads which is said at `Node`."""

    concat: tuple[Source, ...] = ()
    total: tuple[Source, ...] = ()
    activation: str = "identity"
    fields: int = 0
    dim: int = 0
    offset: int = 0
    layers: int = 0
    columns: tuple[int, ...] = ()
    members: "tuple[Node, ...]" = ()
    aten: AtenCall | None = None


@_STRICT
@dataclass(frozen=True, slots=True)
class Node:
    """One operator. `module` is the part of the model it belongs to (`embedding`, `wide`, `fm`, `cross`, `deep`, `head`).

    op              inputs -> outputs                                   params            attrs
    lookup          () -> concat[w], total[1] (either may be absent)                      concat, total
    concat, add     (a, b, ..) -> [sum of widths], [width]
    mul             (a[w], b[w or 1]) -> [w]
    sum             (a[w]) -> [1]
    linear          (a[w]) -> [out]                                     W[out, w] (b[out]) activation
    bias            (a[w]) -> [w]                                       b[w]
    activation      (a[w]) -> [w]                                                         activation
    fm              (x[w]) -> [1]                                                         offset, fields, dim
    aten            (a, b, ..) -> [product of its sizes]                any               aten
    fused only:
    cross_v1        (x0) -> [w]; all layers                             w[w], b[w] a layer layers
    cross_v1_head   (x0) -> [tasks]: x_L W[:, offset:]^T, x_L unwritten .., W[tasks, *]   layers, offset
    cross_v2        (x0, xl) -> [w]: x0 * (W xl + b) + xl               W[w, w], b[w]
    head            (part.., logit..) -> [tasks], sigmoid applied       W[tasks, *] (b)   columns (of W, a part)
    wave            nodes that run side by side, perhaps the head behind ..               members
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str
    params: tuple[str, ...] = ()
    attrs: Attrs = field(default_factory=Attrs)


@_STRICT
@dataclass(frozen=True)
class Graph:
    """Nodes in a topological order, each value's width, each parameter's shape, and the value that holds the scores."""

    nodes: tuple[Node, ...]
    widths: Mapping[str, int]
    params: Mapping[str, Shape]
    output: str

    def __post_init__(self) -> None:
        known: set[str] = set()
        for n in self.nodes:
            for i in n.inputs:
                if i not in known:
                    raise ValueError(f"graph node {n.name}: got input {i!r}, expected a value made before it")
            for o in n.outputs:
                if o in known or o not in self.widths:
                    raise ValueError(f"graph node {n.name}: got output {o!r}, expected a new name with a known width")
                known.add(o)
            for p in n.params:
                if p not in self.params:
                    raise ValueError(f"graph node {n.name}: got parameter {p!r}, expected one with a known shape")
            if n.op == "aten":
                self._check_aten(n)
        if self.output not in known:
            raise ValueError(f"graph output: got {self.output!r}, expected a value of the graph")

    def _check_aten(self, n: Node) -> None:
        if n.attrs.aten is None or not n.inputs or len(n.outputs) != 1:
            raise ValueError(
                f"graph node {n.name}: got {len(n.inputs)} inputs and {len(n.outputs)} outputs, expected a call of some"
            )
        try:
            check_call(n.attrs.aten, [self.widths[i] for i in n.inputs], [self.params[p] for p in n.params])
        except ValueError as error:
            raise ValueError(f"graph node {n.name}: {error}") from None
        width, size = self.widths[n.outputs[0]], prod(n.attrs.aten.sizes)
        if width != size:
            raise ValueError(f"graph node {n.name}: got width {width}, expected {size} as its sizes say")

    def producers(self) -> dict[str, Node]:
        """Value name -> the node that makes it."""
        return {o: n for n in self.nodes for o in n.outputs}

    def consumers(self) -> dict[str, list[Node]]:
        """Value name -> the nodes that read it, in order (absent: none)."""
        out: dict[str, list[Node]] = {}
        for n in self.nodes:
            for i in dict.fromkeys(n.inputs):
                out.setdefault(i, []).append(n)
        return out

    def predecessors(self) -> dict[str, tuple[str, ...]]:
        """Node name -> names of the nodes whose values it reads."""
        made_by = self.producers()
        return {n.name: tuple(dict.fromkeys(made_by[i].name for i in n.inputs)) for n in self.nodes}

    @property
    def parameter_count(self) -> int:
        return sum(prod(s) for s in self.params.values())


class GraphBuilder:
    """Builds a `Graph` op by op; each method returns the new value's name. Raises ValueError on a shape that does not fit."""

    def __init__(self, schema: FeatureSchema) -> None:
        self.schema = schema
        self._nodes: list[Node] = []
        self._widths: dict[str, int] = {}
        self._params: dict[str, Shape] = {}

    def width(self, value: str) -> int:
        return self._widths[value]

    def lookup(self, feature: str, table: str | None, name: str, module: str) -> str:
        """The row(s) of `table` that the feature names (pooled), or value * row for a number, or the number itself."""
        width = 1 if table is None else self.schema.table(table).dim
        return self._add(Node(name, "lookup", (), (name,), module, attrs=Attrs(concat=(Source(feature, table, width),))), width)

    def concat(self, values: Sequence[str], name: str, module: str) -> str:
        if len(values) == 1:
            return values[0]
        return self._add(Node(name, "concat", tuple(values), (name,), module), sum(map(self.width, values)))

    def sum(self, value: str, name: str, module: str) -> str:
        return self._add(Node(name, "sum", (value,), (name,), module), 1)

    def add(self, values: Sequence[str], name: str, module: str) -> str:
        if len(values) == 1:
            return values[0]
        (width,) = self._same(name, values)
        return self._add(Node(name, "add", tuple(values), (name,), module), width)

    def mul(self, a: str, b: str, name: str, module: str) -> str:
        if self.width(b) not in (1, self.width(a)):
            raise ValueError(f"{name}: got widths {self.width(a)} and {self.width(b)}, expected equal ones or 1")
        return self._add(Node(name, "mul", (a, b), (name,), module), self.width(a))

    def linear(self, x: str, out: int, prefix: str, module: str, *, bias: bool = True, vector: bool = False) -> str:
        """x W^T + b with `prefix.weight` of shape [out, width(x)] (with `vector`, [width(x)], for out = 1)."""
        weight, b = f"{prefix}.weight", f"{prefix}.bias"
        self._param(weight, (self.width(x),) if vector else (out, self.width(x)))
        if bias:
            self._param(b, (out,))
        return self._add(Node(prefix, "linear", (x,), (prefix,), module, (weight, b) if bias else (weight,)), out)

    def bias(self, x: str, param: str, name: str, module: str) -> str:
        self._param(param, (self.width(x),))
        return self._add(Node(name, "bias", (x,), (name,), module, (param,)), self.width(x))

    def activation(self, x: str, kind: str, name: str, module: str) -> str:
        if kind == "identity":
            return x
        return self._add(Node(name, "activation", (x,), (name,), module, attrs=Attrs(activation=kind)), self.width(x))

    def fm(self, x: str, offset: int, fields: int, dim: int, name: str, module: str) -> str:
        if offset + fields * dim > self.width(x):
            raise ValueError(f"{name}: got columns up to {offset + fields * dim}, expected at most {self.width(x)}")
        return self._add(Node(name, "fm", (x,), (name,), module, attrs=Attrs(offset=offset, fields=fields, dim=dim)), 1)

    def finish(self, output: str) -> Graph:
        return Graph(tuple(self._nodes), dict(self._widths), dict(self._params), output)

    def _same(self, name: str, values: Sequence[str]) -> set[int]:
        widths = {self.width(v) for v in values}
        if len(widths) != 1:
            raise ValueError(f"{name}: got widths {sorted(widths)}, expected equal ones")
        return widths

    def _param(self, name: str, shape: Shape) -> None:
        if self._params.setdefault(name, shape) != shape:
            raise ValueError(f"parameter {name}: got shape {shape}, expected {self._params[name]} as before")

    def _add(self, node: Node, width: int) -> str:
        self._nodes.append(node)
        self._widths[node.outputs[0]] = width
        return node.outputs[0]
