"""What a run of pytest makes once, however many processes it has."""

import fcntl
from collections.abc import Callable
from pathlib import Path


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, by `make`, which is given another to make it at; who comes meanwhile waits for it."""
    if not path.exists():
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = path.with_name(f"{path.stem}.part{path.suffix}")
                make(unfinished)
                unfinished.rename(path)
    return path
