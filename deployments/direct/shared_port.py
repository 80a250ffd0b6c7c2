"""One listening socket for all processes of an application on a node, and as many connections for each of them.

The kernel keeps one queue of connections that nobody has accepted, so that a process that dies or drains loses none of them.
Whoever accepts one hands it to the process with the fewest: a client keeps its connection, and would keep a busy process too.
Processes know each other by abstract Unix sockets, which carry sockets (SCM_RIGHTS) and vanish with their process.
"""

import asyncio
import contextlib
import errno
import logging
import math
import mmap
import os
import socket
import time
from array import array

from deployments.direct.direct_server import DirectServer
from deployments.direct.listener import MOST_CONNECTIONS
from deployments.fanin.handshake import CREDENTIALS
from deployments.fanin.shared_memory import shared_memory
from dpiframe_core.errors import ConfigError

log = logging.getLogger(__name__)

MOST_PROCESSES = 128  # twice the ingresses of the largest fan-in: those of a rolling update run side by side

_BACKLOG = 4096
_PATIENCE_S, _ASK_S, _FULL_S, _TOLD_S = 10.0, 0.1, 0.1, 0.02
_ACCEPTS = 16  # at a time
# Who has the socket; here it is; serve this client; all are to leave.
_ASK, _SHARE, _TAKE, _LEAVE = b"?", b"!", b"+", b"."
_NOBODY = -1


class SharedPort:
    """This process's part. Make it with `open_port`, on the server's event loop."""

    def __init__(self, place: str, server: DirectServer) -> None:
        self._place, self._server = place, server
        self._loop = asyncio.get_running_loop()
        self._listening: socket.socket | None = None
        self._closing = False
        self._end: asyncio.Task[None] | None = None
        self._mail, self._slot = _mailbox(place)
        self._keep_counts(shared_memory("dpiframe-direct", 4 * MOST_PROCESSES))
        self._counts[:] = memoryview(array("i", [_NOBODY] * MOST_PROCESSES))
        self._loop.add_reader(self._mail, self._read_mail)

    async def open(self, host: str, port: int) -> None:
        """Raises ConfigError if somebody else has the port."""
        give_up = time.monotonic() + _PATIENCE_S
        while self._listening is None:
            try:
                self._listening = socket.create_server((host, port), backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > give_up:
                    raise ConfigError(f"http.direct_port: got {port} ({error.strerror}), expected a free port") from None
                for slot in range(MOST_PROCESSES):
                    if slot != self._slot:
                        self._sent(slot, _ASK)
                await asyncio.sleep(_ASK_S)  # meanwhile `_read_mail` may get it
        self._listening.setblocking(False)
        self._accept_again()

    async def close(self, drain_s: float) -> None:
        """Leaves the port to the others, and serves the clients that are here until their requests are answered. Once."""
        self._end = self._end or self._loop.create_task(self._close(drain_s))
        await self._end

    async def _close(self, drain_s: float) -> None:
        self._closing, self._counts[self._slot] = True, _NOBODY
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        await self._server.drain(drain_s)
        self._loop.remove_reader(self._mail)
        self._read_mail()
        self._mail.close()

    def _accept_again(self) -> None:
        if self._listening is not None:
            self._counts[self._slot] = self._server.connections
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            for _ in range(_ACCEPTS):
                if self._server.connections >= MOST_CONNECTIONS:
                    break
                client, _ = self._listening.accept()
                self._place_client(client)
            else:
                return
        except (BlockingIOError, ConnectionAbortedError):  # another process was faster, or the client is gone already
            return
        except OSError as error:  # no descriptor is left
            log.warning("direct port: got no connection (%s), expected one", error.strerror)
        self._loop.remove_reader(self._listening)
        self._loop.call_later(_FULL_S, self._accept_again)

    def _place_client(self, client: socket.socket) -> None:
        client.setblocking(False)
        mine = self._counts[self._slot] = self._server.connections if self._listening else _NOBODY
        others = [(count, slot) for slot, count in enumerate(self._counts) if count != _NOBODY and slot != self._slot]
        for count, slot in sorted(others):
            if mine != _NOBODY and mine <= count:
                break
            if self._sent(slot, _TAKE, client.fileno()):
                self._counts[slot] += 1
                client.close()
                return
        if self._server.adopt(client):
            self._counts[self._slot] += 1
        else:
            client.close()

    def _sent(self, to: int, what: bytes, *fds: int) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            self._mail.sendmsg([what], rights, 0, _name(self._place, to))
        except ConnectionRefusedError:
            self._counts[to] = _NOBODY
            return False
        except OSError:  # it has not read its mail for long, or the kernel has no room for more sockets on their way
            return False
        return True

    def _read_mail(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                what, fds, sender = _received(self._mail)
                if what == _TAKE and len(fds) == 1:
                    self._place_client(socket.socket(fileno=fds[0]))
                elif what == _SHARE and len(fds) == 2 and self._listening is None and not self._closing:
                    self._listening = socket.socket(fileno=fds[0])
                    self._keep_counts(fds[1])
                elif what == _LEAVE:  # whoever asked for it decides for how long
                    self._end = self._end or self._loop.create_task(self._close(math.inf))
                else:
                    if what == _ASK and self._listening is not None and sender is not None:
                        self._sent(sender, _SHARE, self._listening.fileno(), self._counts_fd)
                    for fd in fds:
                        os.close(fd)

    def _keep_counts(self, fd: int) -> None:
        self._counts_fd, self._counts = fd, memoryview(mmap.mmap(fd, 4 * MOST_PROCESSES)).cast("i")


async def open_port(server: DirectServer, place: str, host: str, port: int) -> SharedPort:
    """Has `server` serve `host`:`port`, alone or with the other processes of this `place`.

    Raises:
        ConfigError: the port is taken, or there are too many processes.
    """
    shared = SharedPort(place, server)
    try:
        await shared.open(host, port)
    except BaseException:
        await shared.close(0)
        raise
    return shared


def leave(place: str, within_s: float) -> None:
    """Has all processes of a `place` close the port and answer what they have. Returns once they did, or after so long."""
    slots, give_up = set(range(MOST_PROCESSES)), time.monotonic() + within_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mail:
        mail.setblocking(False)
        while slots and time.monotonic() < give_up:
            for slot in list(slots):
                try:
                    mail.sendto(_LEAVE, _name(place, slot))
                except ConnectionRefusedError:
                    slots.remove(slot)
                except OSError:  # it has not read the last ones yet
                    continue
            time.sleep(_TOLD_S)


def _name(place: str, slot: int) -> str:
    return f"{place}-direct-{slot}"


def _mailbox(place: str) -> tuple[socket.socket, int]:
    """Under the first name that no other process has."""
    mail = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mail.setblocking(False)
    mail.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    for slot in range(MOST_PROCESSES):
        try:
            mail.bind(_name(place, slot))
            return mail, slot
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    mail.close()
    raise ConfigError(f"http.direct_port: got more than {MOST_PROCESSES} processes on a node, expected at most so many")


def _received(mail: socket.socket) -> tuple[bytes, list[int], int | None]:
    """A message of this user's processes, its descriptors, and the sender's slot; of another user's, nothing of it."""
    room = socket.CMSG_SPACE(2 * array("i").itemsize) + socket.CMSG_SPACE(CREDENTIALS.size)
    what, ancillary, _, sender = mail.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    fds, user = array("i"), None
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, user, _ = CREDENTIALS.unpack(content)
    if user != os.getuid():
        for fd in fds:
            os.close(fd)
        return b"", [], None
    last = (sender or b"").rpartition(b"-")[2]
    return what, fds.tolist(), int(last) if last.isdigit() else None
