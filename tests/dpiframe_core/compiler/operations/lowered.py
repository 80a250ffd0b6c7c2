"""A function of float32[n, *sizes] by the nodes that `compile` makes of it.

For values that no request may have: NaN, infinite ones.
"""

import torch
from torch import nn

from dpiframe_core.compiler.compiled import _lowered
from dpiframe_core.compiler.examples import Scored
from dpiframe_core.compiler.trace import traces
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table
from dpiframe_core.operators.generic.aten_functions import AtenOperator
from dpiframe_core.operators.generic.windows import window
from dpiframe_core.operators.torch_operators import small_operator


class _Of(nn.Module):
    """Its values are rows of one table: torch traces an input, and as many of numbers would take it longer than all else."""

    def __init__(self, function, sizes):
        super().__init__()
        self.function, self.sizes = function, sizes
        self.rows = nn.Embedding(3, torch.Size(sizes).numel())

    def forward(self, row):
        return self.function(self.rows(row).reshape(row.shape[0], *self.sizes)).float()


class Lowered:
    """ops: the names of the generic nodes, in order."""

    def __init__(self, function, *sizes):
        feature = Categorical(name="row", values="int", encoder=Identity(), table="rows", missing_id=0)
        schema = FeatureSchema(features=(feature,), tables=(Table(name="rows", rows=3, dim=torch.Size(sizes).numel()),))
        scored = Scored(_Of(function, sizes).eval(), ["row"], "keywords", None, False)
        lowering, _, self.result = _lowered(traces(scored, [torch.arange(3)]), schema, {"row": torch.arange(3)}, None)
        self._nodes, self._params = lowering.emitter.nodes, lowering.emitter.params
        self.ops = [n.attrs.aten.op if n.op == "aten" else n.op for n in self._nodes]

    def __call__(self, x, device="cpu"):
        """float32[n, ..] of x[n, *sizes]."""
        values = {"x": x.flatten(1).to(device)}
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
