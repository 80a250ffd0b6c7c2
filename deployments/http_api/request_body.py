"""The body of an HTTP request, read within bounds and decompressed within the same bounds; and what becomes of a client that
hangs up. Knows no FastAPI and no models.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

from deployments.config import Limits
from deployments.scoring.faults import Words
from dpiframe_core.errors import DPIFrameError, InputError, TooLarge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Route = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON, ARROW, BINARY = "application/json", "application/vnd.apache.arrow.stream", "application/octet-stream"
_WBITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}  # "deflate" means zlib's format, as RFC 9110 has it
_WATCH_AFTER_S = 0.002  # most requests are answered sooner, and watching for a hang-up costs a task


class UnsupportedMediaType(InputError):
    """The body comes in a form that this route does not read."""

    status = 415
    code = "unsupported_media_type"


class SlowBody(DPIFrameError):
    """The client stalls, or sends its body a little at a time."""

    status = 408
    code = "slow_body"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class HangUp:
    """Cancels the body of a `with` when the client goes away, and leaves it with `ClientGone`.

    Enter it when the request has been read: it consumes what `receive` says afterwards.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._gone = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        # Only our own cancellation becomes ClientGone; one from outside (a shutdown) passes.
        if self._gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from None

    def _start(self) -> None:
        self._watch = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


def header_of(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first header of that name, which is in lower case."""
    return next((value for key, value in headers if key == name), None)


def media_type(headers: Iterable[Header], accepted: tuple[str, ...]) -> str:
    """`Content-Type` without its parameters; the first accepted one if there is none, or if it is a dialect of JSON.

    Raises:
        UnsupportedMediaType: it is none of `accepted`.
    """
    return media_type_of(header_of(headers, b"content-type"), accepted)


@lru_cache(64)
def media_type_of(value: bytes | None, accepted: tuple[str, ...]) -> str:
    """As `media_type`, of that header."""
    if value is None:
        return accepted[0]
    kind = value.split(b";", 1)[0].strip().lower().decode("latin-1")
    if kind in accepted:
        return kind
    if JSON in accepted and kind.startswith("application/") and kind.endswith("+json"):
        return JSON
    raise UnsupportedMediaType("Content-Type", value.decode("latin-1"), " or ".join(accepted))


async def read_body(headers: Iterable[Header], receive: Receive, limits: Limits) -> bytes:
    """The whole body, decompressed, never holding more than `max_body_bytes` and one chunk of it.

    Raises:
        SlowBody: its end does not come within `max_body_s`.
        TooLarge: it is longer, or says that it will be, or becomes so when decompressed.
        UnsupportedMediaType: it is compressed in a way that is not known here.
        InputError: it is not what its `Content-Encoding` says, or cut short.
        ClientGone: the connection closed before its end.
    """
    max_bytes = limits.max_body_bytes
    encoding = checked_encoding(headers, max_bytes)
    try:
        async with asyncio.timeout(limits.max_body_s):
            body = await _received(receive, max_bytes)
    except TimeoutError:
        raise slow_body(limits) from None
    if encoding in _WBITS:  # on a thread: a few kilobytes may become all that is allowed
        return await asyncio.to_thread(decompressed, body, _WBITS[encoding], max_bytes)
    return body


def checked_encoding(headers: Iterable[Header], max_bytes: int) -> bytes:
    """`Content-Encoding`, in lower case.

    Raises:
        TooLarge: `Content-Length` says that the body will be longer than `max_bytes`.
        UnsupportedMediaType: the encoding is not known here.
    """
    encoding = b""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > max_bytes):
            raise TooLarge("Content-Length", value.decode(), f"at most {max_bytes}")
        if name == b"content-encoding":
            encoding = value.strip().lower()
            if encoding not in (b"", b"identity", *_WBITS):
                raise UnsupportedMediaType("Content-Encoding", value.decode("latin-1"), "gzip, deflate or identity")
    return encoding


def slow_body(limits: Limits) -> SlowBody:
    return SlowBody(f"body: got no end of it, expected one within {limits.max_body_s:g} s")


async def _received(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise TooLarge("body", size, f"at most {max_bytes} bytes")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def decompressed(body: bytes, wbits: int, max_bytes: int) -> bytes:
    """One stream of zlib's or gzip's format, whole.

    Raises:
        TooLarge: it holds more than `max_bytes`; no more than that is ever made of it.
        InputError: it is not of that format, is cut short, or goes on after its end.
    """
    stream = zlib.decompressobj(wbits)
    rule = "one whole compressed stream, as Content-Encoding says"
    try:
        out = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InputError("body", Words(str(error)), rule) from None
    if len(out) > max_bytes:
        raise TooLarge("body", Words(f"more than {max_bytes} bytes when decompressed"), f"at most {max_bytes}")
    if not stream.eof or stream.unused_data:
        raise InputError("body", Words("a stream cut short" if not stream.eof else "bytes after the stream"), rule)
    return out
