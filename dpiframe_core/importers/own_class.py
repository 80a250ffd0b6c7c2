"""A model class of the user's own, from a file of Python: the one place of the importers that runs code which is not ours."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dpiframe_core.errors import InputError, listed
from dpiframe_core.importers.state_dict import StateDict


def own_class(source: str) -> type[nn.Module]:
    """The class that "FILE.py:CLASS" names. The file is run, with its directory in the search path of imports.

    Raises:
        InputError: no such file or class, or the file cannot be run (a library that it imports is missing); nothing else is.
    """
    found, module, where = _named(source)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        here = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module)]
        raise InputError(where, source.rpartition(":")[2], f"a subclass of torch.nn.Module in it, {_one_of(here)}")
    return found


def own_maker(source: str, *arguments: object) -> Callable[[], nn.Module]:
    """The class or function that "FILE.py:NAME" names, to be called with these arguments. Raises as `own_class`."""
    found, module, where = _named(source)
    if not callable(found):
        here = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise InputError(where, source.rpartition(":")[2], f"a class or function in it that makes the module, {_one_of(here)}")

    def make() -> nn.Module:
        made = found(*arguments)
        if not isinstance(made, nn.Module):
            raise TypeError(f"got {type(made).__name__}, expected a torch.nn.Module")
        return made

    return make


def _one_of(names: list[str]) -> str:
    return f"one of {listed(names)}" if names else "of which it has none"


def _named(source: str) -> tuple[Any, ModuleType, str]:
    """What "FILE.py:NAME" names, None if nothing; the module of the file; and how errors call it."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not name or path.suffix != ".py":
        raise InputError("--source", source, "FILE.py:CLASS, a file of Python and a class in it")
    if not path.is_file():
        raise InputError("--source", str(path), "a file of Python")
    module = _run(path)
    return getattr(module, name, None), module, f"--source {path}"


def with_weights(make: Callable[[], nn.Module], weights: StateDict, where: str) -> nn.Module:
    """The module that `make` constructs, in eval mode on the CPU, with every parameter of the checkpoint.

    Raises:
        InputError: the constructor refuses, module and checkpoint differ in names or shapes, or the module has weights that no
            checkpoint has; `where` names the class.
    """
    module = _made(make, where)
    outside, again = _outside(module), dict[str, Tensor]()
    if outside:
        del module  # two at a time would need their memory twice
        module = _made(make, where)
        again = _outside(module)
    for name, t in outside.items():
        if t.requires_grad or name not in again or not torch.equal(t, again[name]):
            raise InputError(
                f"{where}: {name}", "weights outside of its state_dict", "a parameter or a buffer: no checkpoint has it"
            )
    given, own = weights.remaining(), module.state_dict()
    for got, names in (("lacks", own.keys() - given.keys()), ("has no place for", given.keys() - own.keys())):
        if names:
            subject = "the checkpoint" if got == "lacks" else "the class"
            raise InputError(where, f"{subject} {got} {listed(sorted(names))}", "the class and settings of the training")
    for name in own:
        if (found := list(given[name].shape)) != (shape := list(own[name].shape)):
            raise InputError(f"{where}: {name}", f"shape {found} in the checkpoint", f"{shape} as made")
    given = {name: t.to(own[name].dtype).contiguous() for name, t in given.items()}
    memory = {StorageWeakRef(t.untyped_storage()) for t in own.values()}  # type: ignore[no-untyped-call]
    del own
    _hold(module, given)
    if not all(m.expired() for m in memory):  # type: ignore[no-untyped-call]  # something has views of it: they need the values
        module = _made(make, where)
        module.load_state_dict(given)
    return module


def _hold(module: nn.Module, named: Mapping[str, Tensor]) -> None:
    """Makes these tensors, which may lie in a file, the module's: no copies."""
    before = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    module.load_state_dict(named, assign=True)
    for name, t in before:
        t.data = named.get(name, t.data)  # for who keeps it in a list, too


def _made(make: Callable[[], nn.Module], where: str) -> nn.Module:
    try:
        return make().cpu().eval()
    except InputError:
        raise
    except Exception as e:  # the user's code: whatever it raises is what it says
        raise InputError(f"{where}, its constructor", _said(e), "a module made from the run's configuration") from None


def _outside(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a module that its state_dict does not have."""
    found = dict(module.named_buffers())
    for prefix, part in module.named_modules():
        found |= {f"{prefix}.{key}".lstrip("."): v for key, v in vars(part).items() if isinstance(v, Tensor)}
    return {name: t for name, t in found.items() if name not in module.state_dict()}


def _run(path: Path) -> ModuleType:
    """In a directory with an `__init__.py` it is a module of that package, so that it may import its neighbours by a dot."""
    folder, name = path.absolute().parent, f"dpiframe_source_{path.stem}"
    for known in [m for m in sys.modules if m.partition(".")[0].startswith("dpiframe_source_")]:
        del sys.modules[known]
    sys.path.insert(0, str(folder))
    try:
        if (folder / "__init__.py").is_file():
            package = f"dpiframe_source_{folder.name}"
            _loaded(package, folder / "__init__.py", [str(folder)])
            name = f"{package}.{path.stem}"
        return sys.modules[name] if name in sys.modules else _loaded(name, path, None)
    except ModuleNotFoundError as e:
        raise InputError(f"--source {path}", f"no module {e.name!r}", "the library that trained it, installed here") from None
    except Exception as e:  # as above
        raise InputError(f"--source {path}", _said(e), "a file of Python that runs") from None
    finally:
        sys.path.remove(str(folder))


def _loaded(name: str, file: Path, folders: list[str] | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch look a class's module up there
    spec.loader.exec_module(module)
    return module


def _said(error: Exception) -> Any:
    return f"{type(error).__name__}: {error}"
