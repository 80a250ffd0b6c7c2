"""Clients at one listening socket, for one process alone."""

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger(__name__)

_MOST = 32
FULL_S = 0.1  # after which who had no room looks again
_SAID_S = 60.0  # between two lines of the log that say the same


class TakesClients(Protocol):
    """Whoever answers them."""

    @property
    def full(self) -> bool: ...
    def accept(self, listening: int, most: int, /) -> list[int]: ...
    def adopt(self, clients: Sequence[int], /) -> int: ...
    async def drain(self, within_s: float) -> None: ...


class Newcomers:
    """Who waits at a server's listening sockets. Why they wait on is said once a minute."""

    def __init__(self, server: TakesClients, port: str) -> None:
        self._server, self._port, self._said = server, port, -math.inf

    def accepted(self, listening: socket.socket, most: int) -> list[int] | None:
        """At most so many of them, by descriptor; None: there is no room for one."""
        why = "as many connections as may be"
        if not self._server.full:
            try:
                return self._server.accept(listening.fileno(), most)
            except OSError as error:  # no descriptor is left
                why = f"no connection ({error.strerror})"
        if time.monotonic() > self._said + _SAID_S:
            self._said = time.monotonic()
            log.warning("%s: got %s, expected room for one more: newcomers wait", self._port, why)
        return None


class Accepting:
    """Gives all clients to `server`, from now on. Make and close it on one event loop; it owns both."""

    def __init__(self, server: TakesClients, listening: socket.socket) -> None:
        self._server, self._listening = server, listening
        self._newcomers = Newcomers(server, "port of the replica")
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which clients inherit
        self._again()

    def stop(self) -> None:
        """Nobody else is let in but those who wait already; who is here stays."""
        if self._listening.fileno() >= 0:
            while self._accept_some() == _MOST:
                pass
            self._loop.remove_reader(self._listening)
            self._listening.close()

    async def close(self, within_s: float) -> None:
        """`stop`; who is here gets what they have asked for, for so long at most. Once."""
        self.stop()
        await self._server.drain(within_s)

    def _again(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept_some)

    def _accept_some(self) -> int:
        clients = self._newcomers.accepted(self._listening, _MOST)
        if clients is None:
            self._loop.remove_reader(self._listening)
            self._loop.call_later(FULL_S, self._again)
            return 0
        for client in clients[self._server.adopt(clients) :]:
            os.close(client)
        return len(clients)
