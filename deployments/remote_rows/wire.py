"""What a replica and a shard of rows say to each other over TCP. First a secret, which lets in; then questions, and to each one
answer: raw bytes of ids, raw bytes of rows. Little-endian, as every host that we run on.
"""

import socket
import struct
from collections.abc import Sequence

import numpy as np

from dpiframe_core.errors import InputError
from dpiframe_core.far_rows.row_source import Wanted

SECRET_BYTES = 32
MOST_IDS = 1 << 22  # of a question
_MOST_PARTS = 1 << 12
_HEAD = struct.Struct("<II")  # parts and ids of a question
_PART = np.dtype([("table", "<u4"), ("ids", "<u4")])
_ANSWER = struct.Struct("<BQ")
ROWS, FAULT = 0, 1


def question(wanted: Sequence[Wanted]) -> bytes:
    """Of rows of several tables.

    Raises:
        InputError: too many.
    """
    ids = np.concatenate([np.asarray(own, "<i8") for _, own in wanted]) if wanted else np.zeros(0, "<i8")
    if len(ids) > MOST_IDS or len(wanted) > _MOST_PARTS:
        raise InputError("rows", len(ids), f"at most {MOST_IDS} in a question")
    parts = np.array([(table, len(own)) for table, own in wanted], _PART)
    return b"".join((_HEAD.pack(len(parts), len(ids)), parts.tobytes(), ids.tobytes()))


def read_question(link: socket.socket) -> list[Wanted] | None:
    """None: the other side has left.

    Raises:
        InputError: no question. OSError: the link broke.
    """
    head = _received(link, _HEAD.size, may_end=True)
    if head is None:
        return None
    parts, ids = _HEAD.unpack(head)
    if parts > _MOST_PARTS or ids > MOST_IDS:
        raise InputError("question", (parts, ids), f"at most {_MOST_PARTS} parts and {MOST_IDS} ids")
    each = np.frombuffer(received(link, parts * _PART.itemsize), _PART)
    if int(each["ids"].astype(np.int64).sum()) != ids:
        raise InputError("question", int(each["ids"].astype(np.int64).sum()), f"{ids} ids, as it says")
    every = np.frombuffer(received(link, 8 * ids), "<i8")
    ends = np.cumsum(each["ids"], dtype=np.int64)
    return [Wanted(int(p["table"]), every[end - int(p["ids"]) : end]) for p, end in zip(each, ends.tolist(), strict=True)]


def answer(kind: int, parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """To be sent in order."""
    return [_ANSWER.pack(kind, sum(len(p) for p in parts)), *parts]


def read_answer(link: socket.socket, expected: int) -> bytearray:
    """The rows' bytes.

    Raises:
        LookupError: the shard says why not. ConnectionError: it says something else; the link is of no use any more.
    """
    kind, size = _ANSWER.unpack(received(link, _ANSWER.size))
    if kind == FAULT and size <= 1 << 16:
        raise LookupError(received(link, size).decode(errors="replace"))
    if kind != ROWS or size != expected:
        raise ConnectionError(f"answer: got kind {kind} of {size} bytes, expected {expected} bytes of rows")
    return received(link, size)


def received(link: socket.socket, size: int) -> bytearray:
    """Exactly so many bytes.

    Raises:
        OSError: the link broke, or nothing came for as long as it waits.
    """
    found = _received(link, size)
    if found is None:
        raise ConnectionError(f"link: got its end, expected {size} bytes")
    return found


def _received(link: socket.socket, size: int, *, may_end: bool = False) -> bytearray | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = link.recv_into(view[at:])
        if not count:
            if may_end and not at:
                return None
            raise ConnectionError(f"link: got its end after {at} bytes, expected {size}")
        at += count
    return data
