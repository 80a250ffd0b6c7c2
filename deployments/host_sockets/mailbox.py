"""Messages, and sockets with them, between processes of one user on a node that know each other by numbers.

Each listens at an abstract Unix socket, which vanishes with its process and asks nobody for permission: so both ends of a
connection look at the user at the other, before anything is sent and before anything is read.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from array import array
from collections.abc import Callable

from deployments.fanin.handshake import check_user
from dpiframe_core.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

MOST_PROCESSES = 128  # twice the ingresses of the largest fan-in: those of a rolling update run side by side
MOST_SOCKETS = 32  # of one message; the kernel takes 253
_FULL_S = 0.1  # until the next try to take a connection, when no descriptor was left

Received = Callable[[socket.socket, bytes, list[int]], None]


class Gone(Exception):
    """Nobody of this user has that number."""


class Mailbox:
    """This process's, under the first free number of `place`, its `slot`. Make it on the event loop that is to read it.

    `received` gets the connection that a message came on, for an answer, the message (one byte), and descriptors, now its own.
    """

    def __init__(self, place: str, received: Received) -> None:
        """Raises ConfigError if all numbers are taken."""
        self._place, self._received = place, received
        self._loop = asyncio.get_running_loop()
        self._listening, self.slot = _listening(place)
        self._made: dict[int, socket.socket] = {}
        self._connections: set[socket.socket] = set()
        self._loop.add_reader(self._listening, self._accept)

    def send(self, to: int, what: bytes, *fds: int) -> bool:
        """False if that process has not read its mail for long, or the kernel has no room for more sockets on their way.

        Raises:
            Gone: as it says.
        """
        known = self._made.get(to)
        if known is not None:
            with contextlib.suppress(ConnectionError):
                return send_on(known, what, *fds)
            self._forget(known)  # that process has ended; another one may have its number
        connection = self._connected(to)
        if connection is None:
            return False
        try:
            return send_on(connection, what, *fds)
        except ConnectionError:
            self._forget(connection)
            raise Gone from None

    def read(self) -> None:
        """Whatever has come by now."""
        self._accept()
        for connection in list(self._connections):
            self._read(connection)

    def close(self) -> None:
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in list(self._connections):
            self._forget(connection)

    def _connected(self, to: int) -> socket.socket | None:
        """None if too many call that process at once."""
        connection = _called(self._place, to)
        if connection is not None:
            self._made[to] = connection
            self._watch(connection)
        return connection

    def _watch(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        self._loop.add_reader(connection, self._read, connection)

    def _forget(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        for slot in [slot for slot, made in self._made.items() if made is connection]:
            del self._made[slot]
        self._loop.remove_reader(connection)
        connection.close()

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._listening.accept()
                connection.setblocking(False)
                try:
                    check_user(connection)
                except Unavailable:
                    connection.close()
                else:
                    self._watch(connection)
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # it stays readable, and would be called for it without a pause
            log.warning("mail of the direct port waits: %s", error.strerror)
            self._loop.remove_reader(self._listening)
            self._loop.call_later(_FULL_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _read(self, connection: socket.socket) -> None:
        try:
            while connection in self._connections:
                what, fds, *_ = socket.recv_fds(connection, 1, MOST_SOCKETS, socket.MSG_CMSG_CLOEXEC)
                if not what:
                    self._forget(connection)
                    return
                self._received(connection, what, fds)
        except BlockingIOError:
            return
        except OSError:
            self._forget(connection)


def send_on(connection: socket.socket, what: bytes, *fds: int) -> bool:
    """As `Mailbox.send`, on a connection. Raises ConnectionError if nobody is there any more."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    try:
        connection.sendmsg([what], rights)
    except ConnectionError:
        raise
    except OSError:
        return False
    return True


def posted(place: str, to: int, what: bytes) -> bool:
    """`Mailbox.send` of a process without a mailbox. Raises Gone."""
    connection = _called(place, to)
    if connection is None:
        return False
    with connection:
        try:
            return send_on(connection, what)
        except ConnectionError:
            raise Gone from None


def _called(place: str, to: int) -> socket.socket | None:
    """A connection to that process, if it is of this user; None if too many call it at once. Raises Gone."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(_name(place, to))
        check_user(connection)
    except (OSError, Unavailable) as error:
        connection.close()
        if isinstance(error, BlockingIOError):
            return None
        raise Gone from None
    return connection


def _name(place: str, slot: int) -> str:
    return f"{place}-direct-{slot}"


def _listening(place: str) -> tuple[socket.socket, int]:
    """Under the first name that no other process has."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.setblocking(False)
    for slot in range(MOST_PROCESSES):
        try:
            listening.bind(_name(place, slot))
            listening.listen(MOST_PROCESSES)
            return listening, slot
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    listening.close()
    raise ConfigError(f"http.direct_port: got more than {MOST_PROCESSES} processes on a node, expected at most so many")
