"""Arguments of an ATen call, taken for what an operation needs them to be."""

from collections.abc import Mapping
from typing import Any

import torch

from dpiframe_core.compiler.operations.emit import Const, Tensor
from dpiframe_core.compiler.operations.strided import Refused, Size, Strided

Arguments = Mapping[str, Any]


def flat(a: Arguments) -> list[Any]:
    """The arguments, and what lists among them hold."""
    return [v for value in a.values() for v in (value if isinstance(value, list | tuple) else [value])]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Const) and value.tensor.ndim == 0)


def number(value: Any) -> float | int:
    if isinstance(value, Const) and value.tensor.numel() == 1:
        value = value.tensor.item()
    if not isinstance(value, int | float):
        what = "the number of rows" if isinstance(value, Size) else "a value of the batch"
        raise Refused(f"got {what} as a number, expected one that is known before there is a batch")
    return int(value) if isinstance(value, bool) else value


def limit(value: Any, none: str) -> float | int | None:
    """A number, or None for the infinity that is no limit."""
    found = None if value is None else number(value)
    return None if found == float(none) else found


def integers(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def constant(value: Any) -> Const:
    if not isinstance(value, Const) or value.batch_dim is not None:
        raise Refused("got a value of the batch as a parameter, expected a constant")
    return value


def tensor(value: Any) -> Tensor:
    return value if isinstance(value, Strided | Const) else Const(torch.tensor(float(number(value))))


def as_its_type(target: str, a: Arguments, dtype: torch.dtype) -> Arguments:
    """A number that is put into integers or truths is one itself. `dtype`: of the call's result.

    Raises:
        Refused: it is a power of integers by what may be below 0, which torch makes whole.
    """
    truths, whole = dtype is torch.bool, not dtype.is_floating_point and dtype is not torch.bool
    if (whole or truths) and is_number(a.get("value")):
        value = number(a["value"])
        return {**a, "value": bool(value) if truths else int(value)}
    if whole and target.startswith("aten.pow."):
        exponent = a["exponent"].tensor if isinstance(a["exponent"], Const) else a["exponent"]
        if isinstance(exponent, Strided) or bool(torch.as_tensor(exponent < 0).any()):
            raise Refused("got a power of integers by what may be below 0, expected numbers: .float() ahead of it")
    return a


def endless(end: Any) -> bool:
    """Whether a slice's end is that of its dimension, be it the batch."""
    return end is None or (isinstance(end, Size) and end == Size(1, True)) or (isinstance(end, int) and end >= 2**62)
