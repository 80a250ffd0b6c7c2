"""The files of a bundle directory: listing, tensor files, and putting a finished directory into place.

Knows nothing of what the files mean. Names in errors are relative to the directory; the caller puts its path before them.
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dpiframe_core.errors import BundleError, shown

_PART_VALUES = 1 << 20


def read_tensors(root: Path, name: str) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, memory-mapped copy-on-write: nothing is read until it is touched."""
    try:
        with safe_open(root / name, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError) as e:
        raise BundleError(f"{name}: got {shown(' '.join(str(e).split()))}, expected a whole safetensors file") from e


def write_tensors(root: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        check_finite(name, key, tensor)
    # safetensors refuses tensors that share memory; only these are worth a copy, as tables may be large.
    shared = len({t.untyped_storage().data_ptr() for t in tensors.values()}) < len(tensors)
    whole = {key: t.detach().cpu().clone() if shared else t.detach().cpu() for key, t in tensors.items()}
    (root / name).parent.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in whole.items()}, root / name)


def check_finite(name: str, key: str, tensor: torch.Tensor) -> None:
    found = first_infinite(tensor)
    if found is not None:
        raise BundleError(f"{name}: {key}: got {found}, expected finite numbers")


def first_infinite(tensor: torch.Tensor) -> float | None:
    """The first value that is NaN or infinite; None if there is none."""
    rows = tensor if tensor.ndim else tensor[None]
    step = max(1, _PART_VALUES * len(rows) // max(1, rows.numel()))
    for start in range(0, len(rows), step):  # parts, so that a large table is not doubled in memory
        part = rows[start : start + step]
        if not torch.isfinite(part).all():
            return float(part[~torch.isfinite(part)][0].item())
    return None


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target`, to be filled and moved there, or a folder of the target's name in it. Of what was made for it
    nothing else is left after the block.

    Raises:
        BundleError: nothing can be written there, or the disk is full.
    """
    made = [folder for folder in target.parents if not folder.exists()]
    staging = target.parent / f".{target.name}-{secrets.token_hex(4)}.new"
    try:
        staging.mkdir(parents=True)
        yield staging
    except BundleError as e:
        raise BundleError(str(e).replace(str(staging / target.name), str(target))) from e
    except (OSError, SafetensorError) as e:
        raise BundleError(f"{target}: got {shown(str(e))}, expected a place that may be written, with room") from e
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):  # the bundle is in the first one
            for folder in made:
                folder.rmdir()


def move_into_place(staging: Path, target: Path) -> None:
    """Makes `staging` durable and renames it to `target`; an older directory there goes only after that."""
    mode = staging.stat().st_mode & 0o666
    for folder, _, names in os.walk(staging):
        for name in names:
            Path(folder, name).chmod(mode)  # safetensors writes its files readable by their owner only
            _sync(Path(folder, name))
        _sync(Path(folder))
    if target.exists():
        old = staging.with_suffix(".old")
        target.rename(old)
        try:
            staging.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old)
    else:
        staging.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
