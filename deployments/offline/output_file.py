"""Files that a command is told to write: refused before the work rather than after it, and never left half-written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpiframe_core.bundle.encoding_files import bundle_around
from dpiframe_core.errors import InputError


def check_outfile(option: str, path: Path, *endings: str) -> None:
    """Raises InputError if nothing can be written there, or the name has none of the endings."""
    if not path.parent.is_dir():
        raise InputError(option, str(path), f"a file in a folder that exists; {path.parent} does not")
    if path.is_dir():
        raise InputError(option, str(path), "a file, not a folder")
    check_outside(option, path)
    if endings and path.suffix.lower() not in endings:
        raise InputError(option, str(path), f"a name that ends in {' or '.join(endings)}")


def check_outside(option: str, path: Path) -> None:
    """Raises InputError if the path lies in a bundle."""
    if around := bundle_around(path):
        raise InputError(option, str(path), f"a path outside of the bundle {around}, which loads with its own files alone")


def write_outfile(option: str, path: Path, text: str) -> None:
    """Raises InputError if the system refuses it."""
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise InputError(option, str(path), f"a file that may be written ({error.strerror})") from None


@contextmanager
def replacing(option: str, path: Path) -> Iterator[Path]:
    """Another path beside `path`, which is renamed to it when the block ends well and removed when it does not.

    Raises:
        InputError: nothing may be written there.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:  # from before it is there: an interrupt may come between any two lines
        try:
            unfinished.touch()
        except OSError as error:
            raise InputError(option, str(path), f"a file that may be written ({error.strerror})") from None
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
