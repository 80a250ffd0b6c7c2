"""Masks that no batch changes, where a module selects by them: a trace gets the positions of what is true.

torch.export takes a mask for values of the batch, so that what it selects would have another size in every call.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dpiframe_core.errors import InputError

# What is made of masks by these alone, and by sizes that do not depend on the batch, is a mask that is known, too.
_NAMES = """unsqueeze squeeze view reshape flatten unflatten expand expand_as repeat transpose permute t clone detach contiguous
    logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor __invert__ __and__ __or__
    __xor__ __rand__ __ror__ __rxor__ __getitem__ tril triu diagonal flip roll"""
_OF_MASKS = frozenset(_NAMES.split())


@contextmanager
def known_masks(module: nn.Module) -> Iterator[None]:
    """Where a module is traced, within `catch_warnings`: it may select by its own masks, and by constants of its code."""
    held = [of for part in module.modules() for of in ((part, part._parameters), (part, part._buffers))]
    moved = [(*of, name, t) for of in held for name, t in of[1].items() if t is not None and t.dtype == torch.bool and t.ndim]
    try:
        for part, tensors, name, tensor in moved:  # of a parameter or buffer a trace would know the shape alone
            del tensors[name]
            part.__dict__[name] = tensor.detach()
        if moved:  # what torch would say of a buffer it only warns of now
            names = "|".join({re.escape(name) for _, _, name, _ in moved})
            warnings.filterwarnings("error", message=rf".*\.({names})[ ,].*assigned during export")
        with _ByPosition():
            yield
    finally:
        for part, tensors, name, tensor in moved:
            part.__dict__.pop(name, None)
            tensors[name] = tensor


class _ByPosition(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.masked_select or func is Tensor.masked_select:
            given: Any = (*args, *named.values())
            x, mask = given
            if _is_known(mask):
                mask = _without_ones(mask)
                sizes = x.shape[-mask.ndim :]
                if mask.ndim < x.ndim and all(isinstance(size, int) for size in sizes):
                    with _disable_current_modes():
                        mask = mask.expand(sizes)
                    return x[(..., *_true_in(mask))].flatten()
        elif args and type(args[0]) is Tensor:  # a batch's are not
            name = getattr(func, "__name__", "")
            if _is_known(args[0]) and _changes(name):
                raise InputError.worded("module", f"a mask that {name} changes", "a mask that stays as it is")
            if name in _OF_MASKS and all(map(_is_known_or_size, tree_leaves((args, named)))):
                with _disable_current_modes():  # a mask of masks is known, too
                    return func(*args, **named)
        elif func is Tensor.__getitem__:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_known, parts)):
                return args[0][tuple(i for part in parts for i in (_true_in(part) if _is_known(part) else [part]))]
        return func(*args, **named)


def _changes(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iand__", "__ior__", "__ixor__")


def _is_known_or_size(value: Any) -> bool:
    return _is_known(value) if isinstance(value, Tensor) else value is None or type(value) in (int, bool, slice)


def _is_known(mask: Any) -> bool:
    """Not one that a trace makes up."""
    return type(mask) is Tensor and mask.dtype == torch.bool and mask.ndim > 0


def _without_ones(mask: Tensor) -> Tensor:
    """Its first dimensions of size 1, which are broadcast anyhow, left out."""
    first = next((i for i, size in enumerate(mask.shape) if size > 1), mask.ndim - 1)
    with _disable_current_modes():
        return mask.flatten(0, first)


def _true_in(mask: Tensor) -> tuple[Tensor, ...]:
    with _disable_current_modes():
        return mask.nonzero(as_tuple=True)
