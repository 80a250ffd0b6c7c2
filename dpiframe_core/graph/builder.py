"""Builds the op graph of a model, value by value; shapes are inferred and checked on the way."""

from collections.abc import Sequence

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import ACTIVATION_PARAMS, Attrs, Graph, Node, Shape, Source


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
