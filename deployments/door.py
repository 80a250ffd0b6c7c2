"""How an ingress and an engine process of one host meet: a Unix socket in a directory named for application and node.

They exchange one message each, with the descriptors of their shared memory; after that the socket says only who has died.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import stat
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dpiframe_core.errors import ConfigError, Unavailable
from dpiframe_core.manifest import first_fault
from dpiframe_core.schema import Strict

_PATIENCE_S = 5.0
_MESSAGE_BYTES = 1 << 16
_SUFFIX = ".sock"


class Hello(Strict):
    """An ingress's request to be served. Comes with the slab, the channel and the eventfd that wakes the ingress.

    Attributes:
        fingerprint: of the bundle that it encodes for, by which the engine knows that ids mean the same to both.
    """

    model: str
    fingerprint: str
    slab_bytes: int


class Welcome(Strict):
    """The engine's answer, with the board and the eventfd that wakes its lanes; `refused` says why not, without them."""

    refused: str = ""
    device: str = ""
    precision: str = ""
    buckets: tuple[int, ...] = ()
    max_batch_rows: int = 0
    max_queued_rows: int = 0


Message = TypeVar("Message", Hello, Welcome)


def meeting_place(application: str, node: str) -> Path:
    """The directory, which only this user can enter. It is made if it is absent.

    Raises:
        ConfigError: somebody else has it.
    """
    digest = hashlib.sha256(f"{application}\0{node}".encode()).hexdigest()[:16]
    place = Path(f"/tmp/dpiframe-{os.getuid()}-{digest}")
    with contextlib.suppress(FileExistsError):
        place.mkdir(0o700)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{place}: got a path that others can reach, expected a directory of this user alone")
    return place


def listen(place: Path) -> tuple[socket.socket, Path]:
    """A socket for ingresses, under a new name. Sockets of engines that have died are removed."""
    for other in engines(place):
        with contextlib.suppress(OSError):
            connect(other).close()
    path = place / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    early = path.with_suffix(".new")
    listener.bind(str(early))
    listener.listen(64)
    early.rename(path)  # under its name it listens: who is refused there meets a dead engine's socket
    return listener, path


def engines(place: Path) -> list[Path]:
    """The sockets of the engines of this node, dead ones among them until somebody calls."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in place.iterdir() if path.suffix == _SUFFIX)
    return []


def connect(path: Path) -> socket.socket:
    """A connection to an engine.

    Raises:
        OSError: it is gone; a dead engine's socket is removed.
    """
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(_PATIENCE_S)
    try:
        caller.connect(str(path))
    except OSError as error:
        caller.close()
        if isinstance(error, ConnectionRefusedError):
            path.unlink(missing_ok=True)
        raise
    return caller


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
            raise Unavailable("door: got the end of the connection, expected a message")
        message = kind.model_validate_json(data, strict=True)
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) not in (count, 0):
            raise Unavailable(f"door: got {len(fds)} descriptors, expected {count}")
    except ValidationError as error:
        _close(fds)
        raise Unavailable(f"door: {first_fault(error)}") from None
    except Unavailable:
        _close(fds)
        raise
    return message, fds


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
