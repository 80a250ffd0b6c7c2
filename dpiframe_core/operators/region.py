"""A region of generic operators as one function of torch, which Inductor compiles into few kernels for any number of rows."""

import os
import warnings
from collections.abc import Mapping, Sequence

import torch

from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.operators.generic.aten_functions import AtenOperator
from dpiframe_core.operators.torch_operators import Compute, small_operator
from kernels.runtime.code_cache import code_folder

# Whose factors take the dense dtype. All else is float32: exponents, logarithms and norms do not bear bfloat16.
_PRODUCTS = frozenset({"aten.linear", "aten.matmul", "aten.einsum"})
# All regions of a process are the same lines of Python: what differs from one to the next is no reason to give up, nor to take
# numbers of the members' for variables.
_SHARED_CODE = {"recompile_limit": 4096, "accumulated_recompile_limit": 4096, "automatic_dynamic_shapes": False}


class RegionFailed(Exception):
    """Inductor did not compile a region."""


class Region:
    """The members of a region, in order, with their weights on one device. Lanes and buckets share it.

    Args:
        dtype: of the factors of products.
        backend: of `torch.compile`.
    """

    def __init__(
        self,
        node: Node,
        graph: Graph,
        dense: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        backend: str = "inductor",
    ) -> None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(code_folder("inductor")))  # its own default is a folder of /tmp
        self._inputs, self._outputs = node.inputs, node.outputs
        self._input_widths = [graph.widths[i] for i in node.inputs]
        self._output_widths = [graph.widths[o] for o in node.outputs]
        self._steps = [(_computation(n, dense, dtype, device), n.inputs, n.outputs[0]) for n in node.attrs.members]
        self._compiled = torch.compile(self._compute, backend=backend, fullgraph=True)
        self.name = node.name

    def __call__(self, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], rows: int) -> None:
        """Writes each output's columns for the first rows of the inputs, all [>= rows, padded width].

        Raises:
            RegionFailed: Inductor could not compile it.
        """
        given = [[t[: max(rows, 2)] for t in side] for side in (ins, outs)]  # torch would compile one row apart from many
        for t in (*given[0], *given[1]):
            torch._dynamo.maybe_mark_dynamic(t, 0)
        try:
            with torch._dynamo.config.patch(_SHARED_CODE), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch about its own parts
                self._compiled(*given)
        except Exception as error:
            raise RegionFailed(f"{self.name}: {_first_paragraph(error)}") from error

    def _compute(self, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
        values = {name: t[:, :width] for name, t, width in zip(self._inputs, ins, self._input_widths, strict=True)}
        for compute, inputs, output in self._steps:
            values[output] = compute(*[values[i] for i in inputs])
        for name, t, width in zip(self._outputs, outs, self._output_widths, strict=True):
            t[:, :width].copy_(values[name])


def _first_paragraph(error: Exception) -> str:
    """On one line; torch goes on with advice on how to report it."""
    return " ".join(str(error).split("\n\n")[0].split())


def _computation(node: Node, dense: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> Compute:
    """A function of the node's inputs, float[rows, width] each, to float32[rows, width].

    Raises:
        ValueError: an operator that no region holds.
    """
    aten, w = node.attrs.aten, [dense[p].to(device, torch.float32) for p in node.params]
    if aten is not None:
        call = AtenOperator(aten, w, device, dtype if aten.op in _PRODUCTS else torch.float32)
        return lambda *ins: call(ins)
    small = small_operator(node, w)
    return lambda *ins: small(*(x.float() for x in ins))
