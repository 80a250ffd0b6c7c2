"""Host memory that a GPU reads in place: of one process, or one copy for all processes of a host. Needs no GPU itself.

with SharedMemory.claim(folder, "tables-3f2a", nbytes) as memory:
    if memory.fresh:               # nobody has filled it yet
        memory.bytes.copy_(rows)
        memory.publish()
    elif not memory.filled():      # who did has died: to be claimed anew
        ...
"""

import fcntl
import logging
import mmap
import os
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)
_PAGE = 4096  # the first one says whether the rest is filled
_READY = b"dpiframe rows 1\n"
_PREFIX, _SUFFIX = "dpiframe-", ".rows"
_LOOK_S = 0.01  # between two looks whether another process has the memory


class SharedMemory:
    """A file in memory, that all processes of a user on one host map which claim its name. The last one to close it removes it,
    and who claims one removes those that killed processes left.

    Attributes:
        bytes: uint8[nbytes]. fresh: whether it is this process's to fill, and then to publish. If not, and another one's that
            has not done so yet, it may be locked meanwhile; see `filled`.

    Raises:
        OSError: the folder has no such room, or no memory files at all.
    """

    def __init__(self, path: Path, file: int, nbytes: int, *, alone: bool) -> None:
        self._path, self._file = path, file
        self._map = mmap.mmap(file, _PAGE + nbytes)
        self.fresh = alone and not self._ready
        self.bytes = torch.from_numpy(np.frombuffer(self._map, np.uint8, nbytes, _PAGE))
        if self._ready:
            fcntl.flock(file, fcntl.LOCK_SH)

    @classmethod
    def claim(cls, folder: Path, name: str, nbytes: int) -> Self:
        """Maps the memory of this name and size; waits while another process takes it from the host."""
        _remove_left(folder)
        path = folder / f"{_PREFIX}{name}-{nbytes}{_SUFFIX}"
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            alone = False
            try:
                alone = _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                memory = cls._opened(path, file, nbytes, alone)
            except BaseException:
                if alone and _is_at(file, path) and os.fstat(file).st_size < _PAGE + nbytes:
                    path.unlink()
                os.close(file)
                raise
            if memory is not None:
                return memory
            os.close(file)

    @classmethod
    def _opened(cls, path: Path, file: int, nbytes: int, alone: bool) -> Self | None:
        """None: it was removed meanwhile, or who took it has died."""
        found = os.fstat(file)
        if not _is_at(file, path):
            return None
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{path}: got a file of others, expected one that only this user may touch")
        if alone:
            os.posix_fallocate(file, 0, _PAGE + nbytes)  # now, and not at a write, which would end the process
        while os.fstat(file).st_size < _PAGE + nbytes:
            if _lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB):
                return None
            time.sleep(_LOOK_S)
        memory = cls(path, file, nbytes, alone=alone)
        return memory if alone or not memory._ready or _is_at(file, path) else None

    @property
    def _ready(self) -> bool:
        return self._map[: len(_READY)] == _READY

    def filled(self) -> bool:
        """Whether the rows are there; waits for the process that fills it. False: that one has died."""
        if not self.fresh:
            fcntl.flock(self._file, fcntl.LOCK_SH)  # of rows that were there long ago, too: it says that they are in use
            if not self._ready:
                _remove_if_unused(self._file, self._path)
        return self._ready

    def publish(self) -> None:
        """What was filled may be read by others."""
        self._map[: len(_READY)] = _READY
        fcntl.flock(self._file, fcntl.LOCK_SH)
        self.fresh = False

    def close(self) -> None:
        """Gives it back; `bytes` may not be touched any more."""
        if self._file < 0:
            return
        _remove_if_unused(self._file, self._path)
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the map has a descriptor of its own, as long as a view is about
        os.close(self._file)
        self._file = -1
        self.bytes = torch.empty(0, dtype=torch.uint8)
        try:
            self._map.close()
        except BufferError:  # a view of it is still about: it goes with that
            log.debug("%s is still in use here", self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class PrivateMemory:
    """As `SharedMemory`, of this process alone.

    Raises:
        MemoryError: the host has no such room.
    """

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, nbytes))
        self.bytes = torch.from_numpy(np.frombuffer(self._map, np.uint8, nbytes))
        self.fresh = True

    def publish(self) -> None:
        self.fresh = False

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)


class DeviceReadable:
    """Host memory page-locked and mapped for the GPUs of this process, until it is closed.

    Args:
        memory: uint8[n], contiguous, which outlives this.

    Raises:
        RuntimeError: the driver refuses: memory of a file on a disk, a limit on locked memory.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        import cupy

        self._memory, self._runtime = memory, cupy.cuda.runtime  # torch would tell of a failure again, at another call
        try:
            self._runtime.hostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE | _MAPPED)
        except self._runtime.CUDARuntimeError as e:
            raise RuntimeError(f"host memory: got {e} for {memory.nbytes:,} bytes, expected to lock them") from e

    def close(self) -> None:
        """The GPU must read it no more."""
        if self._memory.numel():
            self._runtime.hostUnregister(self._memory.data_ptr())
            self._memory = torch.empty(0)


def lock_pages(memory: npt.NDArray[np.uint8], device: torch.device) -> bool:
    """Lets the GPUs of this process read memory in place until the array is gone; whether the driver agrees.

    Args:
        memory: the array that all views of it refer to. device: of those GPUs one that is in use.
    """
    import cupy

    runtime, at = cupy.cuda.runtime, memory.ctypes.data
    try:
        with cupy.cuda.Device(device.index or 0):
            runtime.hostRegister(at, memory.nbytes, _PORTABLE | _MAPPED)
    except runtime.CUDARuntimeError as error:
        log.info("%s bytes of host memory are not locked: %s", f"{memory.nbytes:,}", error)
        return False
    weakref.finalize(memory, _unlock, at, device.index or 0).atexit = False
    return True


def _unlock(at: int, device: int) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    with suppress(runtime.CUDARuntimeError), cupy.cuda.Device(device):  # it may have failed
        runtime.hostUnregister(at)


_PORTABLE, _MAPPED = 1, 2


def _lock(file: int, how: int) -> bool:
    """Whether it was had; without LOCK_NB it waits."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _remove_if_unused(file: int, path: Path) -> None:
    if _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(file, path):
        path.unlink()


def _remove_left(folder: Path) -> None:
    """Files of this user that no process holds."""
    for path in _own(folder):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            _remove_if_unused(file, path)
        finally:
            os.close(file)


def _own(folder: Path) -> Iterator[Path]:
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            if path.lstat().st_uid == os.getuid():
                yield path
        except FileNotFoundError:
            continue
