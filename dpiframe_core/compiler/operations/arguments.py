"""Arguments of an ATen call, taken for what an operation needs them to be."""

from collections.abc import Mapping
from typing import Any

import torch

from dpiframe_core.compiler.operations.emit import Const, Tensor
from dpiframe_core.compiler.operations.strided import Refused, Size, Strided

Arguments = Mapping[str, Any]


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


def endless(end: Any) -> bool:
    """Whether a slice's end is that of its dimension, be it the batch."""
    return end is None or (isinstance(end, Size) and end == Size(1, True)) or (isinstance(end, int) and end >= 2**62)
