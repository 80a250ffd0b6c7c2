"""A `RowSource` of shards on other hosts: which shard has a row, and what is done while one is not there.

A shard that fails is left alone for half a second, in which who asks is told at once; then one thread looks for it anew.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deployments.remote_rows.wire import question, read_answer
from dpiframe_core.errors import Unavailable
from dpiframe_core.far_rows.row_source import RowIds, Wanted

_BLOCK = 8  # 2^8 neighbouring rows are one shard's: of a page of its files, no other shard has rows
_RETRY_S = 0.5
_PAUSE_S = 0.2


class Found(NamedTuple):
    """Where a shard is. fingerprint: of the bundle whose rows it has."""

    host: str
    port: int
    secret: bytes
    fingerprint: str


Find = Callable[[], Found]


class RemoteRows:
    """See `RowSource`.

    Args:
        shards: how to find each, from any thread; may wait, and raise any exception.
        tables: whose rows they have; of them only shapes and dtypes count. fingerprint: of the bundle. timeout_s: for each step
            of an answer.
    """

    def __init__(
        self,
        shards: Sequence[Find],
        tables: Sequence[torch.Tensor],
        fingerprint: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mapped: Sequence[torch.Tensor] | None = None
        self._shapes = [(t.shape[1], t.dtype) for t in tables]
        self._shards = [_Shard(i, find, fingerprint, timeout_s, clock) for i, find in enumerate(shards)]

    def await_all(self, seconds: float) -> None:
        """Returns when all shards are there.

        Raises:
            Unavailable: one is not, after so long.
        """
        give_up = time.monotonic() + seconds
        for shard in self._shards:
            while True:
                try:
                    shard.ask(question([]), 0)
                    break
                except Exception as failure:  # whatever it takes to find one
                    if time.monotonic() > give_up:
                        raise Unavailable(f"rows of other hosts: got {failure}, expected all shards there") from failure
                    time.sleep(_PAUSE_S)

    def parts(self, ids: RowIds) -> Sequence[npt.NDArray[np.intp]]:
        of_shard = self._shard_of(ids)
        return [np.flatnonzero(of_shard == i) for i in np.unique(of_shard)]

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        sizes = [len(ids) * self._shapes[table][0] * self._shapes[table][1].itemsize for table, ids in wanted]
        shard = self._shards[int(self._shard_of(wanted[0].ids[:1])[0])]
        data = shard.ask(question(wanted), sum(sizes))
        found, at = [], 0
        for (table, ids), size in zip(wanted, sizes, strict=True):
            dim, dtype = self._shapes[table]
            found.append(torch.frombuffer(data[at : at + size], dtype=dtype).view(len(ids), dim))
            at += size
        return found

    def close(self) -> None:
        for shard in self._shards:
            shard.drop()

    def _shard_of(self, ids: RowIds) -> RowIds:
        return (ids >> _BLOCK) % len(self._shards)


class _AwayError(ConnectionError):
    """The shard was not there a moment ago, and nobody has asked it again."""


class _Shard:
    """The connections to one, and whether it is thought to be there."""

    def __init__(self, index: int, find: Find, fingerprint: str, timeout_s: float, clock: Callable[[], float]) -> None:
        self._index, self._find, self._fingerprint = index, find, fingerprint
        self._timeout_s, self._clock = timeout_s, clock
        self._idle: list[socket.socket] = []
        self._found: Found | None = None
        self._looking = threading.Lock()
        self._not_before = 0.0
        self._failure: Exception | None = None

    def ask(self, said: bytes, expected: int) -> bytearray:
        """The answer's bytes.

        Raises:
            LookupError: the shard refuses. Exception: it cannot be reached.
        """
        try:
            try:
                link = self._idle.pop()
            except IndexError:
                link = self._connected()
            else:
                try:
                    return self._asked(link, said, expected)
                except TimeoutError:
                    raise
                except OSError:  # of a shard that was replaced since
                    self.drop()
                    link = self._connected()
            return self._asked(link, said, expected)
        except LookupError:
            raise
        except Exception as failure:
            if not isinstance(failure, _AwayError):
                self._found, self._not_before, self._failure = None, self._clock() + _RETRY_S, failure
                self.drop()
            raise

    def drop(self) -> None:
        """Closes the connections that nobody uses."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()

    def _asked(self, link: socket.socket, said: bytes, expected: int) -> bytearray:
        try:
            link.sendall(said)
            data = read_answer(link, expected)
        except LookupError:
            self._idle.append(link)
            raise
        except BaseException:
            link.close()
            raise
        self._idle.append(link)
        return data

    def _connected(self) -> socket.socket:
        found = self._found or self._looked_for()
        link = socket.create_connection((found.host, found.port), self._timeout_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(found.secret)
        return link

    def _looked_for(self) -> Found:
        if self._clock() < self._not_before or not self._looking.acquire(blocking=False):
            why = "no answer yet" if self._failure is None else repr(self._failure)
            raise _AwayError(f"shard {self._index} of rows: got {why}, expected it to come back")
        try:
            found = self._find()
            if found.fingerprint != self._fingerprint:
                got, expected = found.fingerprint[:16], self._fingerprint[:16]
                raise ConnectionError(f"shard {self._index} of rows: got bundle {got}, expected {expected}")
            self._found = found
            return found
        finally:
            self._looking.release()
