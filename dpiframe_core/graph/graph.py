"""The op graph of a model: what is computed from what, nothing executable. Plain frozen data, checked as it is built.

Every value is `float[B, width]` with B the rows of a batch, so a shape is one number. Tensors enter through `lookup` nodes
alone (the batch's ids and numbers are implicit), parameters by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from pydantic import ConfigDict, with_config

from dpiframe_core.graph.aten import AtenCall, check_call
from dpiframe_core.graph.recurrence import Recurrence

Shape = tuple[int, ...]
_STRICT = with_config(ConfigDict(extra="forbid"))  # for `bundle.graph_file`, which reads these from JSON


@_STRICT
@dataclass(frozen=True, slots=True)
class Source:
    """One feature read through one table, or with `table` None a number copied as it is or the mask of a sequence: 1 where
    there is an id, 0 where the list ended. `width` columns.
    """

    feature: str
    table: str | None
    width: int


@_STRICT
@dataclass(frozen=True, slots=True)
class Attended:
    """Which columns of a value a target attention reads and which it passes on.

    length: L, of the sequence. dims: of its parts, side by side in a key: d is their sum. queries, keys: the first column of
    each part's dims[i], and of its L * dims[i] columns. mask: the first of L columns; -1: none, all L count.
    kept: (column, first column of the output, count) of the columns that are passed on. pooled: each part's first column of
    the output. softmax: of the weights over the sequence. output: the activation of a weight.
    scale: what the last layer gives is multiplied by it before.
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
    scale: float = 1.0

    @property
    def dim(self) -> int:
        return sum(self.dims)


@_STRICT
@dataclass(frozen=True, slots=True)
class FieldHeads:
    """Of attention over fields: heads of `size` columns, what the logits of softmax are multiplied by, and of the projections
    Q, K, V, and R where there is a residual, which have a bias, and the first row that each has of its parameters.
    """

    heads: int
    size: int
    scale: float
    biases: tuple[bool, ...]
    firsts: tuple[int, ...]


@_STRICT
@dataclass(frozen=True, slots=True)
class Attrs:
    """The few constants that some ops need; which op reads which is said at `Node`."""

    concat: tuple[Source, ...] = ()
    splits: tuple[int, ...] = ()  # sources of each output of a lookup, where there are several
    total: tuple[Source, ...] = ()
    activation: str = "identity"
    slope: float = 0.0
    outer_bias: bool = False
    fields: int = 0
    dim: int = 0
    offset: int = 0
    layers: int = 0
    columns: tuple[int, ...] = ()
    scalar: float = 0.0
    members: "tuple[Node, ...]" = ()
    keep: int = 0
    diagonal: bool = False
    units: tuple[int, ...] = ()
    halves: bool = False
    fields_first: bool = False
    second_on: bool = False
    attended: Attended | None = None
    field_heads: FieldHeads | None = None
    aten: AtenCall | None = None
    recurrence: Recurrence | None = None

    def outputs_of_concat(self) -> tuple[tuple[Source, ...], ...]:
        """What each of a lookup's outputs but the total holds."""
        counts, parts = self.splits or ((len(self.concat),) if self.concat else ()), []
        for i, count in enumerate(counts):
            first = sum(counts[:i])
            parts.append(self.concat[first : first + count])
        return tuple(parts)


JOINED = "joined"  # the op for which nothing runs
# The parameters of an activation, by its kind; each has one value a unit. Others have none.
ACTIVATION_PARAMS: dict[str, tuple[str, ...]] = {"prelu": ("alpha",), "dice": ("alpha", "scale", "shift")}


@_STRICT
@dataclass(frozen=True, slots=True)
class Node:
    """One operator. `module` is the part of the model it belongs to (`embedding`, `wide`, `fm`, `cross`, `deep`, `head`).

    op              inputs -> outputs                                   params            attrs
    lookup          () -> concat[w] .., total[1] (any may be absent)                      concat, splits, total
    concat, add     (a, b, ..) -> [sum of widths], [width]
    joined          as concat, on a GPU: nothing runs for it, as its inputs are written side by side (`placement`)
    mul             (a[w], b[w or 1]) -> [w]
    sum             (a[w]) -> [1]
    linear          (a[w]) -> [out]                                     W[out, w] (b[out]) activation
    bias            (a[w]) -> [w]                                       b[w]
    activation      (a[w]) -> [w]                                       see below         activation, slope
    fm              (x[w]) -> [1]                                                         offset, fields, dim
    dot             (a, b, ..) -> [keep + pairs] of the joined inputs                     fields, dim, keep, diagonal
    cin             (x[w]) -> [pooled maps of all layers]               W[h, p * m] (b[h]) a layer offset, fields, dim,
                                                                                          units, halves, activation
                    (fused from generic ones, also W[h, m * p]: fields_first; the second half of h goes on: second_on)
    attention       (x[w]) -> [kept + d]                                see `attention`   attended, units, activation, slope
    mixture         (a[fields * dim], g[fields]) -> [fields * dim]                        fields, dim
    gru, lstm       (x[w] (, a[steps])) -> [all hidden states]          see `recurrence`  recurrence, offset
    aten            (a, b, ..) -> [product of its sizes]                any               aten
    fused only:
    field_attention (x[w]) -> [fields * heads * size]                   W[heads * size, dim] (b) fields, dim, offset,
                                                                        each projection   field_heads, activation
    cross_v1        (x0) -> [w]; all layers                             w[w], b[w] a layer layers
    cross_v1_head   (x0) -> [tasks]: x_L W[:, offset:]^T, x_L unwritten .., W[tasks, *]   layers, offset
    cross_v2        (x0, xl) -> [w]: x0 * (W xl + b) + xl               W[w, w] (b[w])    outer_bias: x0 * (W xl) + b + xl
    cross_low_rank  (x0, xl, v[r]) -> [w]: x0 * (W v + b) + xl          W[w, r] (b[w])    outer_bias
    gated           (x0, x[v]) -> [w]: scalar * x0 * activation(W x + b) W[w, v] (b), or W[h, i, j] activation, scalar
                                                                        of each of h heads
    norm            (x[w]) -> [w]: layer norm of each field, a ReLU     weight[dim], bias[dim] fields, dim, scalar (eps),
                                                                                          activation
    head            (part.., logit..) -> [tasks], sigmoid applied       W[tasks, *] (b)   columns (of W, a part; -1: ones)
    wave            nodes that run side by side, perhaps the head behind ..               members
    chain           nodes that run one after the other, the head last   ..               members
    tower           linear layers, one behind the other, perhaps a dot  ..               members

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
        """Node name -> names of the nodes whose values it reads. Joined nodes, for which nothing runs, are not there: who reads
        one waits for all that make its inputs.
        """
        made_by = self.producers()

        def makers(value: str) -> list[str]:
            node = made_by[value]
            return [m for i in node.inputs for m in makers(i)] if node.op == JOINED else [node.name]

        return {n.name: tuple(dict.fromkeys(m for i in n.inputs for m in makers(i))) for n in self.nodes if n.op != JOINED}

    @property
    def parameter_count(self) -> int:
        return sum(prod(s) for s in self.params.values())
