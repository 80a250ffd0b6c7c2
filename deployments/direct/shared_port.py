"""One listening socket, or two, for all processes of an application on a node, and as many connections for each of them.

The kernel keeps one queue of connections that nobody has accepted, so that a process that dies or drains loses none of them.
Whoever accepts one hands it to the process with the fewest: a client keeps its connection, and would keep a busy process too.
"""

import asyncio
import errno
import math
import mmap
import os
import socket
import time
from array import array
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace

from deployments.direct.direct_server import DirectServer
from deployments.fanin.shared_memory import shared_memory
from deployments.host_sockets.accepting import FULL_S, Newcomers
from deployments.host_sockets.listening import Place
from deployments.host_sockets.mailbox import MOST_PROCESSES, MOST_SOCKETS, Gone, Mailbox, posted, send_on

_PATIENCE_S, _ASK_S, _TOLD_S = 10.0, 0.1, 0.02
_NEXT_S = 0.002  # after which who has found clients looks again: one by one each would cost two processes a wake-up
_ACCEPTS = MOST_SOCKETS  # at a time: all of them may be another process's
# Who has the sockets; here they are; serve this client; all are to leave.
_ASK, _SHARE, _TAKE, _LEAVE = b"?", b"!", b"+", b"."
_NOBODY = -1


class SharedPort:
    """This process's part. Make it with `open_port`, on the server's event loop."""

    def __init__(self, meeting: str, server: DirectServer, places: Sequence[Place]) -> None:
        self._server, self._places = server, places
        self._newcomers = Newcomers(server, "direct port")
        self._loop = asyncio.get_running_loop()
        self._listening: dict[Place, socket.socket] = {}
        self._opening, self._closing = True, False
        self._end: asyncio.Task[None] | None = None
        self._mail = Mailbox(meeting, self._read)
        self._keep_counts(shared_memory("dpiframe-direct", 4 * MOST_PROCESSES))
        self._counts[:] = memoryview(array("i", [_NOBODY] * MOST_PROCESSES))

    async def open(self) -> None:
        """Raises ConfigError if somebody else has a place. Told to leave meanwhile, it opens none."""
        give_up = time.monotonic() + _PATIENCE_S
        for place in self._places:
            while place not in self._listening:
                try:
                    self._listening[place] = place.listen()
                except OSError as error:
                    others = error.errno in (errno.EADDRINUSE, errno.EAGAIN)
                    if not others or time.monotonic() > give_up:
                        raise place.refusal(error) from None
                    for slot in range(MOST_PROCESSES):
                        if slot != self._mail.slot:
                            self._sent(slot, _ASK)
                    await asyncio.sleep(_ASK_S)  # meanwhile `_read` may get it
                    if self._closing:
                        return
        self._opening = False
        for listening in self._listening.values():
            listening.setblocking(False)
        self._server.counted = self._count
        self._accept_again()

    async def close(self, drain_s: float) -> None:
        """Leaves its places to the others, and serves the clients that are here until their requests are answered. Once."""
        self._end = self._end or self._loop.create_task(self._close(drain_s))
        await self._end

    async def _close(self, drain_s: float) -> None:
        self._closing, self._counts[self._mail.slot] = True, _NOBODY
        while self._listening:
            place, listening = self._listening.popitem()
            self._loop.remove_reader(listening)
            listening.close()
            place.left()
        await self._server.drain(drain_s)
        self._mail.read()
        self._mail.close()

    @property
    def _takes(self) -> bool:
        """Whether it takes clients that have just come."""
        return bool(self._listening) and not self._closing

    def _count(self, connections: int) -> None:
        """Tells the others; they place clients by it."""
        if self._takes:
            self._counts[self._mail.slot] = connections

    def _accept_again(self) -> None:
        self._count(self._server.connections)
        for listening in self._listening.values():
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """A round of clients: those who have been served before wait no longer than for these."""
        clients = self._newcomers.accepted(listening, _ACCEPTS)
        if clients is None or 0 < len(clients) < _ACCEPTS:
            for each in self._listening.values():
                self._loop.remove_reader(each)
            self._loop.call_later(FULL_S if clients is None else _NEXT_S, self._accept_again)
        self._place_clients(clients or [])

    def _place_clients(self, clients: list[int]) -> None:
        """Gives each to whoever has the fewest then."""
        me, refusing = self._mail.slot, {self._mail.slot}
        while clients:
            loads = [(count, slot) for slot, count in enumerate(self._counts) if count != _NOBODY and slot not in refusing]
            if self._takes or not loads:
                loads.append((self._server.connections, me))
            given, clients = shares(clients, loads, me), []
            for slot, fds in given.items():
                if slot == me:
                    left = fds[self._server.adopt(fds) :]
                elif self._sent(slot, _TAKE, *fds):
                    self._counts[slot] += len(fds)
                    left = fds
                else:
                    refusing.add(slot)
                    clients += fds
                    left = []
                for fd in left:
                    os.close(fd)
        self._count(self._server.connections)

    def _sent(self, to: int, what: bytes, *fds: int) -> bool:
        try:
            return self._mail.send(to, what, *fds)
        except Gone:
            self._counts[to] = _NOBODY
            return False

    def _read(self, connection: socket.socket, what: bytes, fds: list[int]) -> None:
        if what == _TAKE:
            self._place_clients(fds)
            return
        if what == _SHARE and len(fds) > 1 and self._opening and not self._closing:
            self._keep_counts(fds.pop())
            for listening in [socket.socket(fileno=fd) for fd in fds]:
                place = next((place for place in self._places if place.name == listening.getsockname()), None)
                if place is None or self._listening.setdefault(place, listening) is not listening:
                    listening.close()
            fds.clear()
        elif what == _LEAVE:  # whoever asked for it decides for how long
            self._end = self._end or self._loop.create_task(self._close(math.inf))
        elif what == _ASK and self._listening:
            fds_of_mine = [listening.fileno() for listening in self._listening.values()]
            send_on(connection, _SHARE, *fds_of_mine, self._counts_fd)
        for fd in fds:
            os.close(fd)

    def _keep_counts(self, fd: int) -> None:
        self._counts_fd, self._counts = fd, memoryview(mmap.mmap(fd, 4 * MOST_PROCESSES)).cast("i")


def shares(clients: Iterable[int], loads: list[tuple[int, int]], me: int) -> dict[int, list[int]]:
    """Who gets which, one after the other to the fewest. `loads`: connections and number of each process; ties are for `me`."""
    fewest = [(count, slot != me, slot) for count, slot in loads]
    heapify(fewest)
    given: dict[int, list[int]] = {}
    for client in clients:
        count, other, slot = fewest[0]
        given.setdefault(slot, []).append(client)
        heapreplace(fewest, (count + 1, other, slot))
    return given


async def open_port(server: DirectServer, meeting: str, places: Sequence[Place]) -> SharedPort:
    """
    Args:
        meeting: what the names of this application's processes on this node have in common (`meeting_place`).

    Raises:
        ConfigError: as `SharedPort.open`, or there are too many processes.
    """
    shared = SharedPort(meeting, server, places)
    try:
        await shared.open()
    except BaseException:
        await shared.close(0)
        raise
    return shared


def leave(meeting: str, within_s: float) -> None:
    """Has all processes that meet there, and who comes meanwhile, close their places and answer what they have; until they did,
    or for so long.
    """
    give_up = time.monotonic() + within_s
    while sum(_told(meeting, slot) for slot in range(MOST_PROCESSES)) and time.monotonic() < give_up:  # some come late
        time.sleep(_TOLD_S)


def _told(meeting: str, slot: int) -> bool:
    """Whether there is a process, which is told to leave."""
    try:
        posted(meeting, slot, _LEAVE)
    except Gone:
        return False
    return True
