"""A checkpoint's parameters, each taken exactly once: what a model does not take is refused by name, never skipped.

The only place that reads PyTorch's files, with `weights_only=True`. Knows no models.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch

from dpiframe_core.bundle.bundle_files import first_infinite
from dpiframe_core.errors import InputError, listed

# A training script often saves a dict of things; these are its usual keys for the model.
_SAVED = "a saved state_dict: torch.save(model.state_dict(), ..)"
_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_state", "state", "net")


class StateDict:
    """Parameter name -> tensor, and which of them have been taken. `where` begins every error: the file's name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        """Raises InputError for a value that is no finite tensor."""
        self.where = where
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise InputError(f"{where}: {name}", type(value).__name__, "a tensor")
            if value.is_floating_point() and first_infinite(value) is not None:
                raise InputError(f"{where}: {name}", "NaN or infinity", "finite parameters")
        self._left = dict(tensors)

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """The parameter, detached on the CPU as it is stored; `shape`: its sizes where known, None where any will do.

        Raises:
            InputError: it is not there (or was taken), or has another shape.
        """
        if name not in self._left:
            near = [other for other in self._left if other.split(".")[0] == name.split(".")[0]]
            raise InputError(
                f"{self.where}: {name}", "no such parameter", f"it, beside {listed(near or self._left or ['nothing'])}"
            )
        value = self._left.pop(name)
        got = tuple(value.shape)
        if len(got) != len(shape) or any(want is not None and want != size for want, size in zip(shape, got, strict=True)):
            want_text = ", ".join("any" if size is None else str(size) for size in shape)
            raise InputError(f"{self.where}: {name}", f"shape {list(got)}", f"[{want_text}]")
        return value.detach().cpu()

    def without_prefix(self, prefix: str) -> Self:
        """The same without a prefix that all names have, if they have it."""
        if all(name.startswith(prefix) for name in self._left):
            return type(self)({name.removeprefix(prefix): value for name, value in self._left.items()}, self.where)
        return self

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a parameter not yet taken."""
        return tuple(self._left[name].shape) if name in self._left else None

    def remaining(self) -> dict[str, torch.Tensor]:
        """Those not yet taken, under their names."""
        return dict(self._left)

    def no_table_left(self, prefix: str, spec: str) -> None:
        """Raises InputError: there is a table `prefix`NAME.weight, which no feature of `spec` has read."""
        for name in self._left:
            if name.startswith(prefix):
                lacking = f"no {name.removeprefix(prefix).removesuffix('.weight')}"
                raise InputError(f"{spec}: features", lacking, f"it, as {self.where} has {name}")

    def drop(self, name: str) -> None:
        """Takes what inference does not read (a counter, a constant mask), if it is there."""
        self._left.pop(name, None)

    def below(self, prefix: str) -> list[str]:
        """Names not yet taken that begin with `prefix.`, without it, in the order of the file."""
        return [name.removeprefix(f"{prefix}.") for name in self._left if name.startswith(f"{prefix}.")]

    def children(self, prefix: str) -> list[int]:
        """The numbers that follow `prefix.` in names not yet taken, ascending: the layers of an `nn.Sequential`."""
        heads = {name.split(".")[0] for name in self.below(prefix)}
        return sorted(int(head) for head in heads if head.isdecimal())

    def finish(self, model: str) -> None:
        """Raises InputError, with the names, if anything was not taken."""
        if self._left:
            got = f"{len(self._left)} parameters left over"
            raise InputError(self.where, got, f"a place in {model} for {listed(self._left)}")


def read_checkpoint(path: Path) -> StateDict:
    """A `state_dict` saved by `torch.save`, alone or under one of the usual keys of a dict.

    Raises:
        InputError: the file is missing, damaged, or holds more than tensors and plain containers.
    """
    try:
        mapped = zipfile.is_zipfile(path)  # what torch.save has written since 1.6 is read where it lies, row by row
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (FileNotFoundError, IsADirectoryError):
        raise InputError("checkpoint", str(path), "a file that torch.save wrote") from None
    except pickle.UnpicklingError as e:
        # PyTorch's own text advises weights_only=False: only its reason is passed on.
        reason = next((line.strip() for line in str(e).splitlines() if "Unsupported" in line or "GLOBAL" in line), None)
        raise InputError(str(path), f"a pickle of more than weights ({reason or 'which PyTorch refuses'})", _SAVED) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as e:
        raise InputError(str(path), f"damaged data ({str(e).splitlines()[0] if str(e) else type(e).__name__})",
                         "a whole file written by torch.save") from None  # fmt: skip
    if isinstance(saved, Mapping):
        for key in _WRAPPERS:
            if isinstance(saved.get(key), Mapping):
                saved = saved[key]
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        raise InputError(str(path), type(saved).__name__, "a state_dict: parameter names and tensors")
    prefix = "module."  # of nn.DataParallel and DistributedDataParallel
    if saved and all(name.startswith(prefix) for name in saved):
        saved = {name.removeprefix(prefix): value for name, value in saved.items()}
    return StateDict(saved, str(path))
