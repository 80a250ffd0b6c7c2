"""Masks and positions that no batch changes, where a module selects by them: a trace gets the positions of what is true.

torch.export takes a mask for values of the batch, so that what it selects would have another size in every call. So what a
module makes of constants alone is worked out beside the trace.
"""

import re
import warnings
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from dpiframe_core.errors import InputError

# What is made of masks by these alone, and by sizes that do not depend on the batch, is a mask that is known, too.
_NAMES = """unsqueeze squeeze view reshape flatten unflatten expand expand_as repeat transpose permute t clone detach contiguous
    logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor __invert__ __and__ __or__
    __xor__ __rand__ __ror__ __rxor__ __getitem__ tril triu diagonal flip roll"""
_OF_MASKS = frozenset(_NAMES.split())
_SIZED_BY_VALUES = {"nonzero", "argwhere", "combinations", "masked_select", "repeat_interleave", "where", "__getitem__"}
_TO_NUMBER = {"__bool__", "__float__", "__int__", "__index__", "item"}
_MORE_VIEWS = "view_as narrow select unbind split chunk movedim swapaxes as_strided __get__"
_VIEWS = _OF_MASKS.union(_MORE_VIEWS.split())
_IN_PLACE = re.compile(r".*[^_]_|__setitem__|__i(and|or|xor|add|sub|mul|div|truediv|floordiv|mod|pow|lshift|rshift)__")
_MOST = 1 << 20  # elements of one that is worked out
# What torch itself asks of a tensor, most calls of a trace: no values go in or come out.
_METHODS = "size stride storage_offset untyped_storage numel dim is_conj is_neg is_inference _is_view"
_ATTRIBUTES = "shape dtype device layout is_leaf is_sparse is_quantized requires_grad"
_ASKED = {getattr(Tensor, name) for name in _METHODS.split()} | {getattr(Tensor, n).__get__ for n in _ATTRIBUTES.split()}


@contextmanager
def known_masks(module: nn.Module, numbers: bool = False) -> Iterator[None]:
    """Where a module is traced, within `catch_warnings`: it may select by its own masks, and by constants of its code.
    numbers: it may branch on its buffers of one number, too.
    """
    held: list[tuple[nn.Module, dict[str, Any]]] = [
        of for part in module.modules() for of in ((part, part._parameters), (part, part._buffers))
    ]
    moved = [
        (part, tensors, name, t)
        for part, tensors in held
        for name, t in tensors.items()
        if t is not None and (_is_known(t.detach()) or (numbers and tensors is part._buffers and t.numel() == 1))
    ]
    try:
        for part, tensors, name, tensor in moved:  # of a parameter or buffer a trace would know the shape alone
            del tensors[name]
            part.__dict__[name] = tensor.detach()
        if moved:  # what torch would say of a buffer it only warns of now
            names = "|".join({re.escape(name) for _, _, name, _ in moved})
            warnings.filterwarnings("error", message=rf".*\.({names})[ ,].*assigned during export")
        with _ByPosition({id(part.__dict__[name]) for part, _, name, _ in moved}):
            yield
    finally:
        for part, tensors, name, tensor in moved:
            part.__dict__.pop(name, None)
            tensors[name] = tensor


class _ByPosition(TorchFunctionMode):
    def __init__(self, kept: Set[int]) -> None:
        """kept: the ids of the module's own tensors that are known."""
        super().__init__()
        self._kept = kept
        self._worked_out: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a tensor of the trace: it, and its values
        self._own: set[int] = set()  # the memory of those, but for what is a part of a constant of the module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        if func in _ASKED:
            return func(*args, **named)
        if func is torch.masked_select or func is Tensor.masked_select:
            given: Any = (*args, *named.values())
            x, mask = given[0], self._mask(given[1])
            if mask is not None and not self._is_constant(x):
                mask = _without_ones(mask)
                sizes = x.shape[-mask.ndim :]
                if mask.ndim < x.ndim and all(isinstance(size, int) for size in sizes):
                    with _disable_current_modes():
                        mask = mask.expand(sizes)
                    return x[(..., *_true_in(mask))].flatten()
        elif name in _TO_NUMBER and self._is_constant(args[0]):
            with _disable_current_modes():
                return func(self._values(args[0]))
        elif args and type(args[0]) is Tensor:  # a batch's are not
            if _changes(name) and (_is_known(args[0]) or id(args[0]) in self._kept):
                raise InputError.worded("module", f"a buffer that {name} changes", "one that stays as it is")
            if name in _OF_MASKS and all(map(_is_known_or_size, tree_leaves((args, named)))):
                with _disable_current_modes():  # a mask of masks is known, too
                    return func(*args, **named)
        elif func is Tensor.__getitem__ and not self._is_constant(args[0]):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            masks = [self._mask(part) for part in parts]
            if any(mask is not None for mask in masks):
                whole = zip(parts, masks, strict=True)
                return args[0][tuple(i for part, mask in whole for i in ([part] if mask is None else _true_in(mask)))]
        return self._beside(func, name, args, named)

    def _beside(self, func: Any, name: str, args: Any, named: Any) -> Any:
        """Calls it; and if it makes a tensor of constants alone, works that out, too, without the trace."""
        leaves = tree_leaves((args, named))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        changes, elsewhere = _changes(name), name == "__set__" or named.get("out") is not None
        known = all(map(self._is_constant, tensors)) and not any(isinstance(leaf, torch.SymInt) for leaf in leaves)
        known = known and "empty" not in name and not elsewhere
        if known and changes:  # a constant of the module stays as it is
            known = bool(tensors) and _memory(self._values(tensors[0])) in self._own
        if not known:  # a batch's values may be written, here or by what shares the memory
            written = tree_leaves(args[:1]) if changes and args else tensors if changes or elsewhere or name in _VIEWS else []
            for one in written:
                self._forget(one)
            return func(*args, **named)
        own_args, own_named = tree_map(self._values, (args, named))
        if name in _SIZED_BY_VALUES and _has_other_size(name, tensors, own_args):
            with _disable_current_modes():
                values = func(*own_args, **own_named)
            made = tree_map(lambda value: torch.tensor(value.tolist(), dtype=value.dtype).reshape(value.shape), values)
            self._note(made, values, set())
            return made
        made = func(*args, **named)
        found = [] if made is None else tree_leaves(made)
        if all(isinstance(one, Tensor) and type(one) is not Tensor and one.numel() <= _MOST for one in found):
            given = {_memory(value) for value in tree_leaves((own_args, own_named)) if isinstance(value, Tensor)}
            with _disable_current_modes():
                state = torch.get_rng_state()
                values = func(*own_args, **own_named)
                drawn = not torch.equal(state, torch.get_rng_state())
                torch.set_rng_state(state)
            if not drawn and found:
                self._note(made, values, given)
        elif name in _VIEWS and any(isinstance(one, Tensor) for one in found):
            for tensor in tensors:
                self._forget(tensor)
        return made

    def _note(self, made: Any, values: Any, given: set[int]) -> None:
        pairs = list(zip(tree_leaves(made), tree_leaves(values), strict=True))
        self._own |= {_memory(value) for _, value in pairs} - given
        self._worked_out |= {id(one): (one, value) for one, value in pairs}

    def _is_constant(self, x: Any) -> bool:
        return id(x) in self._worked_out or (type(x) is Tensor and not torch._is_functional_tensor(x))

    def _values(self, x: Any) -> Any:
        return self._worked_out[id(x)][1] if id(x) in self._worked_out else x

    def _mask(self, x: Any) -> Tensor | None:
        """The truths of one that is known."""
        found = self._values(x)
        return found if _is_known(found) else None

    def _forget(self, changed: Any) -> None:
        """What a batch's values are written into is no constant, nor what shares its memory."""
        if id(changed) in self._worked_out:
            memory = _memory(self._worked_out[id(changed)][1])
            self._worked_out = {i: pair for i, pair in self._worked_out.items() if _memory(pair[1]) != memory}
            self._own.discard(memory)


def _has_other_size(name: str, tensors: Sequence[Tensor], args: Sequence[Any]) -> bool:
    """Whether the values of its arguments say how large its result is."""
    if name == "__getitem__":
        return any(_is_known(leaf) for leaf in tree_leaves(args[1:]))
    if name == "repeat_interleave":
        return len(tensors) == 2 or len(args) == 1
    return bool(tensors) and (name != "where" or len(args) == 1)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _changes(name: str) -> bool:
    return _IN_PLACE.fullmatch(name) is not None


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
