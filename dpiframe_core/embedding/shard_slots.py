"""Which processes of a host share the warm rows of a model's tables, found by files alone: a process holds the lock of its slot
for as long as it lives, however it ends. No server knows them, so none can fail.
"""

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Self

_PREFIX = "dpiframe-"


class ShardSlot:
    """This process's slot, [0, slots), and the handles that those of the other slots have published.

    Attributes:
        index: of the slot; other processes of the model on this host have others.
    """

    def __init__(self, index: int, file: int, paths: list[Path]) -> None:
        self.index, self._file, self._paths = index, file, paths

    @classmethod
    def claim(cls, folder: Path, name: str, slots: int) -> Self | None:
        """The first free slot; None: all are taken."""
        paths = slot_paths(folder, name, slots)
        for index, path in enumerate(paths):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if os.fstat(file).st_uid == os.getuid() and _locked(file, fcntl.LOCK_EX):
                os.ftruncate(file, 0)  # what a process before published is gone with it
                return cls(index, file, paths)
            os.close(file)
        return None

    def publish(self, handle: bytes) -> None:
        """Lets others find what is behind a handle. Again after it changed."""
        text = json.dumps({"handle": handle.hex(), "token": secrets.token_hex(8)}).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)

    def close(self) -> None:
        """Leaves the slot to others."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = -1


def slot_paths(folder: Path, name: str, slots: int) -> list[Path]:
    return [folder / f"{_PREFIX}{name}-shard{i}.lock" for i in range(slots)]


def published(paths: list[Path], own: int | None) -> list[tuple[str, bytes] | None]:
    """Of each slot that a living process other than `own` holds: a token of what it published, and the handle."""
    return [None if i == own else _published(path) for i, path in enumerate(paths)]


def _published(path: Path) -> tuple[str, bytes] | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(file).st_uid != os.getuid() or _locked(file, fcntl.LOCK_SH):
            return None  # nobody holds it
        text = os.pread(file, 4096, 0)
        try:
            said = json.loads(text)
            return str(said["token"]), bytes.fromhex(said["handle"])
        except (ValueError, KeyError, TypeError):
            return None  # not published yet
    finally:
        os.close(file)


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
