"""The op graph of a model: what is computed from what, nothing executable. Plain frozen data, checked as it is built.

Every value is `float[B, width]` with B the rows of a batch, so a shape is one number. Tensors enter through `lookup` nodes
alone (the batch's ids and numbers are implicit), parameters by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from dpiframe_core.schema import FeatureSchema

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One feature read through one table, or with `table` None a number copied as it is or the mask of a sequence: 1 where
    there is an id, 0 where the list ended. `width` columns.
    """

    feature: str
    table: str | None
    width: int


@dataclass(frozen=True, slots=True)
class Attended:
    """Which columns of a value a target attention reads and which it passes on.

    length: L, of the sequence. dims: of its parts, side by side in a key: d is their sum. queries, keys: the first column of
    each part's dims[i], and of its L * dims[i] columns. mask: the first of L columns; -1: none, all L count.
    kept: (column, first column of the output, count) of the columns that are passed on. pooled: each part's first column of
    the output. softmax: of the weights over the sequence. output: the activation of a weight.
    """

    length: int
    dims: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    pooled: tuple[int, ...]
    mask: int = -1
    kept: tuple[tuple[int, int, int], ...] = ()
    softmax: bool = False
    output: str = "identity"

    @property
    def dim(self) -> int:
        return sum(self.dims)


@dataclass(frozen=True, slots=True)
class Attrs:
    """The few constants that some ops need; which op reads which is said at `Node`."""

    concat: tuple[Source, ...] = ()
    splits: tuple[int, ...] = ()  # sources of each output of a lookup, where there are several
    total: tuple[Source, ...] = ()
    activation: str = "identity"
    slope: float = 0.0
    fields: int = 0
    dim: int = 0
    offset: int = 0
    layers: int = 0
    columns: tuple[int, ...] = ()
    members: "tuple[Node, ...]" = ()
    keep: int = 0
    diagonal: bool = False
    units: tuple[int, ...] = ()
    halves: bool = False
    attended: Attended | None = None

    def outputs_of_concat(self) -> tuple[tuple[Source, ...], ...]:
        """What each of a lookup's outputs but the total holds."""
        counts, parts = self.splits or ((len(self.concat),) if self.concat else ()), []
        for i, count in enumerate(counts):
            first = sum(counts[:i])
            parts.append(self.concat[first : first + count])
        return tuple(parts)


# The parameters of an activation, by its kind; each has one value a unit. Others have none.
ACTIVATION_PARAMS: dict[str, tuple[str, ...]] = {"prelu": ("alpha",), "dice": ("alpha", "scale", "shift")}


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. `module` is the part of the model it belongs to (`embedding`, `wide`, `fm`, `cross`, `deep`, `head`).

    op              inputs -> outputs                                   params            attrs
    lookup          () -> concat[w] .., total[1] (any may be absent)                      concat, splits, total
    concat, add     (a, b, ..) -> [sum of widths], [width]
    mul             (a[w], b[w or 1]) -> [w]
    sum             (a[w]) -> [1]
    linear          (a[w]) -> [out]                                     W[out, w] (b[out]) activation
    bias            (a[w]) -> [w]                                       b[w]
    activation      (a[w]) -> [w]                                       see below         activation, slope
    fm              (x[w]) -> [1]                                                         offset, fields, dim
    dot             (a, b, ..) -> [keep + pairs] of the joined inputs                     fields, dim, keep, diagonal
    cin             (x[w]) -> [pooled maps of all layers]               W[h, p * m] (b[h]) a layer offset, fields, dim,
                                                                                          units, halves, activation
    attention       (x[w]) -> [kept + d]                                see `attention`   attended, units, activation, slope
    mixture         (a[fields * dim], g[fields]) -> [fields * dim]                        fields, dim
    fused only:
    cross_v1        (x0) -> [w]; all layers                             w[w], b[w] a layer layers
    cross_v1_head   (x0) -> [tasks]: x_L W[:, offset:]^T, x_L unwritten .., W[tasks, *]   layers, offset
    cross_v2        (x0, xl) -> [w]: x0 * (W xl + b) + xl               W[w, w], b[w]
    cross_low_rank  (x0, xl, v[r]) -> [w]: x0 * (W v + b) + xl          W[w, r], b[w]
    head            (part.., logit..) -> [tasks], sigmoid applied       W[tasks, *] (b)   columns (of W, a part)
    wave            nodes that run side by side, perhaps the head behind ..               members

    Activations: identity, relu, sigmoid, tanh, gelu, gelu_tanh (by its tanh formula), leaky_relu (slope attr), prelu
    (x < 0: alpha x) and dice (x (p + alpha (1 - p)), p = sigmoid(scale x + shift)), whose parameters `ACTIVATION_PARAMS` names.
    A fused linear has them behind its own.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str
    params: tuple[str, ...] = ()
    attrs: Attrs = field(default_factory=Attrs)


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
        if self.output not in known:
            raise ValueError(f"graph output: got {self.output!r}, expected a value of the graph")

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
        width = self.schema.columns_read(feature, table)
        return self._add(Node(name, "lookup", (), (name,), module, attrs=Attrs(concat=(Source(feature, table, width),))), width)

    def mask(self, feature: str, name: str, module: str) -> str:
        """1 for each id of a sequence feature, 0 where its list has ended. `float[B, max_values]`."""
        f = self.schema.feature(feature)
        if not f.is_id or f.pooling != "none":
            raise ValueError(
                f"{name}: got feature {feature} pooled by {f.pooling}, expected a categorical one with pooling 'none'"
            )
        source = Source(feature, None, f.max_values)
        return self._add(Node(name, "lookup", (), (name,), module, attrs=Attrs(concat=(source,))), f.max_values)

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

    def linear(
        self, x: str, out: int, prefix: str, module: str, *, bias: bool = True, vector: bool = False, name: str | None = None
    ) -> str:
        """x W^T + b with `prefix.weight` of shape [out, width(x)] (with `vector`, [width(x)], for out = 1).

        `name`: of the value, if several layers share the parameters.
        """
        weight, b, name = f"{prefix}.weight", f"{prefix}.bias", name or prefix
        self._param(weight, (self.width(x),) if vector else (out, self.width(x)))
        if bias:
            self._param(b, (out,))
        return self._add(Node(name, "linear", (x,), (name,), module, (weight, b) if bias else (weight,)), out)

    def bias(self, x: str, param: str, name: str, module: str) -> str:
        self._param(param, (self.width(x),))
        return self._add(Node(name, "bias", (x,), (name,), module, (param,)), self.width(x))

    def activation(self, x: str, kind: str, name: str, module: str, *, prefix: str = "", slope: float = 0.0) -> str:
        """`kind` as `Node` says; its parameters, one value a column, are `prefix.alpha` and so on."""
        if kind == "identity":
            return x
        params = self.activation_params(kind, prefix, self.width(x))
        attrs = Attrs(activation=kind, slope=slope)
        return self._add(Node(name, "activation", (x,), (name,), module, params, attrs), self.width(x))

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

    def node(self, node: Node, width: int) -> str:
        """Adds an operator of one output of that width, for ops that have no method here (`interactions`)."""
        return self._add(node, width)

    def param(self, name: str, shape: Shape) -> str:
        """Names a parameter; again, if its shape is the same."""
        self._param(name, shape)
        return name

    def activation_params(self, kind: str, prefix: str, width: int) -> tuple[str, ...]:
        """The names of an activation's parameters for so many units: `prefix.alpha` and so on."""
        return tuple(self.param(f"{prefix}.{own}", (width,)) for own in ACTIVATION_PARAMS.get(kind, ()))

    def _param(self, name: str, shape: Shape) -> None:
        if self._params.setdefault(name, shape) != shape:
            raise ValueError(f"parameter {name}: got shape {shape}, expected {self._params[name]} as before")

    def _add(self, node: Node, width: int) -> str:
        self._nodes.append(node)
        self._widths[node.outputs[0]] = width
        return node.outputs[0]
