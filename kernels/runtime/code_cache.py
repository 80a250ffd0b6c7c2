"""Compiled code that is kept for the next start, in the user's cache folder. What lies there is run, so it is taken only from
files and a folder that nobody else can write.
"""

import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from threading import Lock

_OWN = Lock()


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dpiframe`, by default `~/.cache/dpiframe`. A relative XDG_CACHE_HOME does not count."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "dpiframe"


def find_code(name: str) -> Path | None:
    """A file that `store_code` left there, or None."""
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        path = cache_folder() / name
        if path.stat().st_size and _trusted(path.parent) and _trusted(path):
            return path
    return None


def store_code(name: str, data: bytes) -> Path:
    """Writes a file for this process and, where that can be done safely, for later ones."""
    with suppress(OSError, RuntimeError):
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _trusted(folder):
            return _written(data, folder).replace(folder / name)
    return _written(data, _own_folder())


def code_folder(name: str) -> Path:
    """A folder there for code that another library keeps; where none can be had safely, one of this process alone."""
    with suppress(OSError, RuntimeError):
        folder = cache_folder() / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _trusted(folder.parent) and _trusted(folder):
            return folder
    return _own_folder() / name


def _trusted(path: Path) -> bool:
    """Whether this user or root owns it and nobody else may write it. A link is not followed."""
    found = path.lstat()
    return found.st_uid in (0, os.geteuid()) and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def _written(data: bytes, folder: Path) -> Path:
    with NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # a file cut short by a power failure would kill whoever loads it
    return Path(file.name)


def _own_folder() -> Path:
    """Lives as long as the process."""
    with _OWN:  # of two that threads made one would go at once, with what lies in it
        return Path(_temporary_folder().name)


@cache
def _temporary_folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="dpiframe-")
