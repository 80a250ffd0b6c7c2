"""An ingress's rows in memory that an engine process can read: who gets which bytes of it, and when they are free again.

Knows no requests.
"""

import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque

import numpy as np
import numpy.typing as npt

from deployments.fanin.shared_memory import shared_memory

_ALIGN = 64

Bytes = npt.NDArray[np.uint8]


class Extents:
    """Which parts of `size` bytes are free: first fit, neighbours joined. Plain data, for one thread."""

    def __init__(self, size: int) -> None:
        self._starts, self._ends = [0], [size]

    @property
    def free_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes (rounded up to 64), which are the caller's until `give`; None if no gap holds them."""
        size = -(-size // _ALIGN) * _ALIGN
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                if end - start == size:
                    del self._starts[i], self._ends[i]
                else:
                    self._starts[i] = start + size
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Takes back what `take` gave."""
        end = start + -(-size // _ALIGN) * _ALIGN
        i = bisect_left(self._starts, start)
        joins_next = i < len(self._starts) and self._starts[i] == end
        joins_last = i > 0 and self._ends[i - 1] == start
        if joins_next and joins_last:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif joins_next:
            self._starts[i] = start
        elif joins_last:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)


class RequestMemory:
    """Memory that is shared with engine processes, given out as arrays. An array's bytes are free again when nobody has it.

    Any thread may take, since large requests are encoded on threads of their own.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = shared_memory("dpiframe-requests", size)
        self.mapped = mmap.mmap(self.fd, size)
        self._extents = Extents(size)
        self._base = _address(np.frombuffer(self.mapped, np.uint8, 1))
        self._leases: dict[int, tuple[weakref.ref[Bytes], int, int]] = {}
        self._starts: dict[int, int] = {}  # by the ids of arrays: an array's address costs a microsecond
        self._lock = threading.Lock()
        # A weak reference's callback may run anywhere, even where the lock is held: all that it may do is append.
        self._given_up: deque[int] = deque()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._extents.free_bytes

    def take(self, size: int) -> Bytes | None:
        """uint8[size] of zeros at a multiple of 64 bytes; None if there is no room for it."""
        given_up = self._given_up
        with self._lock:
            self._collect()
            start = self._extents.take(size)
            if start is None:
                return None
            array = np.frombuffer(self.mapped, np.uint8, size, start)
            self._leases[start] = weakref.ref(array, lambda _: given_up.append(start)), size, id(array)
            self._starts[id(array)] = start
        array.fill(0)
        return array

    def offset(self, array: Bytes) -> int | None:
        """Where an array lies in it; None if it is of other memory."""
        start = self._starts.get(id(array))
        if start is not None and (lease := self._leases.get(start)) is not None and lease[0]() is array:
            return start
        at = _address(array) - self._base
        return at if 0 <= at < self.size else None

    def close(self) -> None:
        """The engine's mapping and the arrays given out stay valid; the memory goes with the last of them."""
        os.close(self.fd)

    def _collect(self) -> None:
        while self._given_up:
            start = self._given_up.popleft()
            _, size, array_id = self._leases.pop(start)
            if self._starts.get(array_id) == start:
                del self._starts[array_id]
            self._extents.give(start, size)


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
