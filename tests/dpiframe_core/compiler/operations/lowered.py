"""A function of float32[n, *sizes] by the nodes that `compile` makes of it.

For values that no request may have: NaN, infinite ones.
"""

import torch
from torch import nn

from dpiframe_core.compiler.compiled import _lowered
from dpiframe_core.compiler.examples import Scored
from dpiframe_core.features.schema import FeatureSchema, Numeric
from dpiframe_core.operators.aten_functions import AtenOperator
from dpiframe_core.operators.torch_operators import small_operator
from dpiframe_core.operators.windows import window


class _Of(nn.Module):
    def __init__(self, function, sizes):
        super().__init__()
        self.function, self.sizes = function, sizes

    def forward(self, x):
        return self.function(x.reshape(x.shape[0], *self.sizes)).float()


class Lowered:
    """ops: the names of the generic nodes, in order."""

    def __init__(self, function, *sizes):
        self.sizes, width = sizes, torch.Size(sizes).numel()
        schema = FeatureSchema(features=tuple(Numeric(name=f"f{i}") for i in range(width)), tables=())
        example = {f"f{i}": torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(width)}
        scored = Scored(_Of(function, sizes).eval(), list(example), "matrix", None, False)
        lowering, lookups, self.result = _lowered(scored, schema, example, None)
        self._order = [int(feature[1:]) for feature, _ in sorted(lookups.sources, key=lambda s: lookups.sources[s].offset)]
        self._nodes, self._params = lowering.emitter.nodes, lowering.emitter.params
        self.ops = [n.attrs.aten.op if n.op == "aten" else n.op for n in self._nodes]

    def __call__(self, x, device="cpu"):
        """float32[n, ..] of x[n, *sizes]."""
        values = {"x": x.flatten(1)[:, self._order].to(device)}
        for n in self._nodes:
            params, ins = [self._params[p].to(device) for p in n.params], [values[i] for i in n.inputs]
            if n.op == "aten":
                made = AtenOperator(n.attrs.aten, params, torch.device(device))(ins)
            elif n.op == "linear":
                made = nn.functional.linear(ins[0], params[0].reshape(-1, ins[0].shape[1]), *params[1:])
            else:
                made = small_operator(n, params)(*ins)
            values[n.outputs[0]] = made
        atoms = self.result.atoms
        sizes, strides = tuple(a.size for a in atoms), tuple(a.stride for a in atoms)
        found = window(values[self.result.base], sizes, strides, self.result.offset)
        return found.reshape(len(x), *(s.count for s in self.result.sizes if not s.batch)).cpu()
