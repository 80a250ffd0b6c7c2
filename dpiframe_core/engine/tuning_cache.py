"""Keeps what a warm-up learned (which way of computing a layer is fastest at which bucket) in a cache directory for the next.

A file is a hint, never an instruction: it holds names, and who reads it picks among the ways that exist. One that is damaged,
not ours or of another GPU, driver or version is ignored. Knows nothing of what the names mean; no failure here stops a start.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

import kernels
from dpiframe_core.machine.machine import machine
from kernels.runtime.code_cache import cache_folder

log = logging.getLogger(__name__)

_MOST_BYTES = 2**20  # a model of 100 layers and 40 buckets takes 150 kB


@dataclass(frozen=True, slots=True)
class TuningKey:
    """All that a choice depends on. `fingerprint` is the bundle's, `source` a hash of this repository's kernels.

    Bundle, precision and GPU name a cache's file; with any of the rest changed the file is stale and is written anew.
    """

    fingerprint: str
    precision: str
    gpu: str
    driver: str
    torch: str
    cupy: str
    source: str

    @property
    def path(self) -> Path:
        name = hashlib.sha256(json.dumps([self.fingerprint, self.precision, self.gpu]).encode()).hexdigest()
        return cache_folder() / f"choices-{name[:32]}.json"


def tuning_key(fingerprint: str, precision: str, device: torch.device) -> TuningKey:
    """The key of a bundle at a precision on a device of this machine."""
    here = machine(device)
    return TuningKey(fingerprint, precision, here.gpu, here.driver, here.torch, here.cupy, kernel_source_hash())


@lru_cache
def kernel_source_hash() -> str:
    """SHA-256 over the kernels' sources: a way that was rewritten has to be timed again."""
    folder = Path(kernels.__file__ or "").parent
    digest = hashlib.sha256()
    for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.cu*"))):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def load_choices(key: TuningKey) -> dict[str, str]:
    """The choices stored under `key`, by names such as "deep.0@256"; none if there are none to be trusted."""
    try:
        return _read(key)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, RuntimeError) as error:  # RuntimeError: there is no home directory
        log.warning("choices of earlier warm-ups are not used, and will be measured again: %s", error)
        return {}


def store_choices(key: TuningKey, choices: Mapping[str, str]) -> None:
    """Adds choices to those stored under `key`; readers and other writers see the file before or after, never a part of it."""
    with suppress(OSError, ValueError, RecursionError, RuntimeError):
        choices = {**_read(key), **choices}
    try:
        path = key.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".choices-", delete=False) as file:
            try:
                json.dump({"key": asdict(key), "choices": dict(choices)}, file, indent=1, sort_keys=True)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except (OSError, RuntimeError) as error:
        log.warning("choices of this warm-up are not kept for the next one: %s", error)


def _read(key: TuningKey) -> dict[str, str]:
    """The choices of the key's file.

    Raises:
        ValueError: it is not such a file, or of another key.
    """
    path = key.path
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path}: got more than {_MOST_BYTES} bytes, expected fewer")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: got {len(data)} bytes of something else, expected JSON") from None
    if not isinstance(content, dict) or content.keys() != {"key", "choices"} or not isinstance(content["key"], dict):
        raise ValueError(f"{path}: got JSON of another form, expected the objects `key` and `choices`")
    for name, want in asdict(key).items():
        if content["key"].get(name) != want:
            raise ValueError(f"{path}: {name}: got {str(content['key'].get(name))[:80]!r}, expected {want!r}")
    choices = content["choices"]
    if not isinstance(choices, dict) or not all(isinstance(v, str) for v in choices.values()):
        raise ValueError(f"{path}: choices: got something else, expected names by name")
    return choices
