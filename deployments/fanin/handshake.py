"""How an ingress and an engine process of one host meet: at a Unix socket named for application and node.

They exchange one message each, with the descriptors of their shared memory; after that the socket says only who has died.
"""

import errno
import hashlib
import os
import socket
from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from deployments.config import MOST_ENGINES
from dpiframe_core.errors import ConfigError, Unavailable
from dpiframe_core.strict import Strict, first_fault

PATIENCE_S = 5.0  # with whoever is at the other end, for each message
_MESSAGE_BYTES = 1 << 16
CREDENTIALS = Struct("3i")  # struct ucred: pid, uid, gid


class Hello(Strict):
    """An ingress's request to be served. Comes with the request memory, the rings and the eventfd that wakes the ingress.

    Attributes:
        fingerprint: of the bundle that it encodes for, by which the engine knows that ids mean the same to both.
    """

    model: str
    fingerprint: str
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


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
