"""How an ingress and an engine process of one host meet: at a Unix socket named for application and node.

They exchange one message each, with the descriptors of their shared memory; after that the socket says only who has died.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from deployments.config import MOST_ENGINES
from deployments.fanin.board import Board
from deployments.fanin.request_memory import RequestMemory
from deployments.fanin.rings import Rings
from deployments.fanin.shared_memory import shared_memory
from dpiframe_core.errors import ConfigError, Unavailable
from dpiframe_core.strict import Strict, first_fault

PATIENCE_S = 5.0  # with whoever is at the other end, for each message
_MESSAGE_BYTES = 1 << 16
CREDENTIALS = Struct("3i")  # struct ucred: pid, uid, gid


class Hello(Strict):
    """An ingress's request to be served. Comes with the request memory, the rings and the eventfd that wakes the ingress.

    Attributes:
        fingerprint: of the bundle that it encodes for, by which the engine knows that ids mean the same to both.
        layout: where ids lie in its row blocks (`BlockLayout.header`): another release's may lie elsewhere.
    """

    model: str
    fingerprint: str
    layout: tuple[int, ...]
    memory_bytes: Annotated[int, Field(gt=0, lt=2**48)]


class Welcome(Strict):
    """The engine's answer, with the board and the eventfd that wakes its lanes; `refused` says why not, without them."""

    refused: str = ""
    device: str = ""
    precision: str = ""
    buckets: tuple[int, ...] = ()
    max_batch_rows: int = 0
    max_queued_rows: int = 0


Message = TypeVar("Message", Hello, Welcome)


def meeting_place(application: str, node: str) -> str:
    """What the sockets of an application's engines on a node have in common. Abstract names: no file can be left behind."""
    digest = hashlib.sha256(f"{os.getuid()}/{application}/{node}".encode()).hexdigest()[:16]
    return f"\0dpiframe-{digest}"


def listen(place: str) -> socket.socket:
    """A socket for ingresses, under the first name that no other engine of this node has.

    Raises:
        ConfigError: there are too many.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for index in range(MOST_ENGINES):
        try:
            listener.bind(f"{place}-{index}")
            listener.listen(64)
            return listener
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    listener.close()
    raise ConfigError(f"replicas: got more than {MOST_ENGINES} engines of one application on a node, expected at most so many")


def connect(place: str, index: int) -> socket.socket:
    """A connection to an engine of this user. Does not block; what follows may, for some seconds.

    Raises:
        OSError: there is none of that index (ConnectionRefusedError), or too many call at once.
        Unavailable: it is somebody else's.
    """
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        caller.setblocking(False)
        caller.connect(f"{place}-{index}")
        caller.settimeout(PATIENCE_S)
        check_user(caller)
    except BaseException:
        caller.close()
        raise
    return caller


def check_user(other: socket.socket) -> None:
    """Raises Unavailable unless the process at the other end is of this user, as abstract names have no permissions."""
    _, uid, _ = CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if uid != os.getuid():
        raise Unavailable(f"handshake: got a process of user {uid}, expected one of user {os.getuid()}")


def send(to: socket.socket, message: Hello | Welcome, descriptors: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    to.sendmsg([message.model_dump_json().encode()], ancillary)


def receive(source: socket.socket, kind: type[Message], count: int) -> tuple[Message, list[int]]:
    """A message and its `count` descriptors, or none with a refusal. Descriptors are the caller's to close.

    Raises:
        OSError, Unavailable: the other side is gone, or does not speak as agreed.
    """
    held = array("i")
    room = socket.CMSG_LEN(count * held.itemsize)
    data, ancillary, flags, _ = source.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, what, content in ancillary:
        if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            held.frombytes(content[: len(content) - len(content) % held.itemsize])
    fds = held.tolist()
    try:
        if not data:
            raise Unavailable("handshake: got the end of the connection, expected a message")
        message = kind.model_validate_json(data, strict=True)
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) not in (count, 0):
            raise Unavailable(f"handshake: got {len(fds)} descriptors, expected {count}")
    except ValidationError as error:
        _close(fds)
        raise Unavailable(f"handshake: {first_fault(error)}") from None
    except Unavailable:
        _close(fds)
        raise
    return message, fds


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """What an ingress has agreed on with an engine. Filled by `greet`; it is the connection's to close."""

    index: int
    sock: socket.socket
    rings: Rings
    board: Board
    answer_fd: int
    wake_fd: int
    welcome: Welcome

    def close(self) -> None:
        """Leaves the engine, which sees the end of the socket."""
        self.sock.close()
        os.close(self.answer_fd)
        os.close(self.wake_fd)


def greet(sock: socket.socket, index: int, hello: Hello, memory: RequestMemory) -> Agreement:
    """Agrees with the engine that `connect` found. Blocks for some milliseconds, at worst seconds.

    Raises:
        OSError, Unavailable: it is gone, or refuses this ingress.
    """
    rings_fd, answer_fd = shared_memory("dpiframe-rings", Rings.NBYTES), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    fds: list[int] = []
    try:
        send(sock, hello, (memory.fd, rings_fd, answer_fd))
        welcome, fds = receive(sock, Welcome, 2)
        if welcome.refused or len(fds) != 2:
            raise Unavailable(f"engine: {welcome.refused}")
        sock.setblocking(False)
        board_fd, wake_fd = fds
        agreed = Agreement(index, sock, Rings(rings_fd), Board(board_fd, welcome.max_batch_rows), answer_fd, wake_fd, welcome)
        os.close(board_fd)
        return agreed
    except BaseException:
        sock.close()
        for fd in (answer_fd, *fds):
            os.close(fd)
        raise
    finally:
        os.close(rings_fd)


async def greeted(sock: socket.socket, index: int, hello: Hello, memory: RequestMemory) -> Agreement:
    """`greet` on a thread. If nobody waits for it any more, what it comes to is closed."""
    agreeing = asyncio.get_running_loop().run_in_executor(None, greet, sock, index, hello, memory)
    try:
        return await asyncio.shield(agreeing)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # a thread that waits for the welcome waits no longer
        agreeing.add_done_callback(_close_agreed)
        raise


def _close_agreed(agreeing: asyncio.Future[Agreement]) -> None:
    if not agreeing.cancelled() and agreeing.exception() is None:
        agreeing.result().close()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
