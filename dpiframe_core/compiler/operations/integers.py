"""Integers that a module makes of numbers. Here they are float32, which holds each below 2^24: where one is reckoned with that
is larger, the score is no number.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dpiframe_core.compiler.operations.arguments import Arguments, flat, integers
from dpiframe_core.compiler.operations.emit import Const, Emitter
from dpiframe_core.compiler.operations.reductions import reduced
from dpiframe_core.compiler.operations.strided import BATCH, Refused, Strided, unsqueezed

_BOUND = 1 << 24
_LARGE = 1 << 12  # of a constant beside what is counted or found at a position, which is small
_ARITHMETIC = {"add", "sub", "rsub", "mul", "pow", "square", "remainder", "fmod", "floor_divide", "div"}
_UNSURE = {
    "cumsum", "cumprod", "prod", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "einsum", "tensordot", "index_add",
    "scatter_add", "scatter_reduce", "index_put", "mean",
}  # fmt: skip


class Integers:
    """Which values of a graph are made of numbers that were cast, and what their rows must keep to."""

    def __init__(self, emitter: Emitter) -> None:
        self._e = emitter
        self._bases = set[str]()
        self._kept: dict[Strided, None] = {}  # truths [B]

    def add(self, made: Iterable[Strided]) -> None:
        self._bases |= {one.base for one in made}

    def follow(self, target: str, a: Arguments, made: Sequence[Strided]) -> None:
        """What a call makes: integers, or of a view what it was.

        Raises:
            Refused: it may be beyond what can be looked at.
        """
        name, given = target.split(".")[1], flat(a)
        of_cast = [v for v in given if isinstance(v, Strided) and v.base in self._bases]
        most = max((_largest(v) for v in given), default=0)
        if name in _ARITHMETIC and (of_cast or most > _LARGE):
            if most >= _BOUND:
                raise Refused(f"got {target} of integers and {most}, expected less than 2^24")
            for one in (*of_cast, *made):
                self._keep(one)
            self.add(made)
        elif of_cast and name == "sum":
            x: Strided = a["self"]
            dims = integers(a.get("dim")) or list(range(x.rank))
            self._keep(reduced(self._e, "aten.sum", self._e.elementwise("aten.abs", [x]), dims, keep=True))
        elif of_cast and name in _UNSURE:
            raise Refused(f"got {target} of numbers that were cast to integers, expected it ahead of the cast")
        if of_cast:
            self.add(made)

    def checked(self, scores: Strided) -> Strided:
        """NaN in each row that has not kept to it."""
        if not self._kept:
            return scores
        kept, *more = self._kept
        for other in more:
            kept = self._e.elementwise("aten.mul", [kept, other])
        sign = self._e.elementwise("aten.sub.Scalar", [self._e.elementwise("aten.mul.Scalar", [kept], [2])], [1])
        nothing = self._e.elementwise("aten.log", [sign])  # 0, or NaN
        for dim in range(1, scores.rank):
            nothing = unsqueezed(nothing, dim)
        return self._e.elementwise("aten.add", [scores, nothing])

    def _keep(self, x: Strided) -> None:
        if x.dims[0] != (BATCH,):
            raise Refused("got arithmetic on integers of rows that are joined, expected a dimension of their own")
        small = self._e.elementwise("aten.lt.Scalar", [self._e.elementwise("aten.abs", [x])], [_BOUND])
        if x.rank > 1:
            small = reduced(self._e, "aten.amin", small, list(range(1, x.rank)), keep=False)
        self._kept[small] = None


def _largest(value: Any) -> float:
    if isinstance(value, Const) and value.tensor.numel() and value.tensor.dtype != torch.bool:
        return float(value.tensor.abs().max())
    return abs(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0
