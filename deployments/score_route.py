"""`POST /v1/score` as a bare ASGI application: bytes in, scores out. FastAPI's own body handling costs more than the scoring.

Owns the order of the steps, their clock, and what becomes of a client that hangs up. Knows no FastAPI and no Ray.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from deployments import responses
from deployments.batching import check_deadline
from deployments.config import Limits
from deployments.metrics import Metrics, RequestSeen
from deployments.responses import Answer, Header, UnsupportedMediaType
from deployments.schema import ScoreInput, addressed
from deployments.served import Served, find
from dpiframe_core.errors import DPIFrameError, InputError, TooLarge
from dpiframe_core.types import RowBlock

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Values above which a request is encoded on a thread. Below, a thread gains nothing: the interpreter lets it hold the loop
# for 5 ms at a time anyway, and so many values take about that long.
_ENCODE_ON_LOOP_VALUES = 50_000
_ENCODE_ON_LOOP_BYTES = 512 * 1024  # and for the lists of multi-valued features, which may be of any length, that of the body
_WATCH_AFTER_S = 0.002  # most requests are answered sooner, and watching for a hang-up costs a task


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class ScoreRoute:
    """The route, for all models of the process. `models` may change while it runs; `clock` is also the scorers'."""

    def __init__(
        self, models: Mapping[str, Served], limits: Limits, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = models
        self._limits = limits
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        job = _Job(responses.request_id_of(scope["headers"]), self._clock())
        answer: Answer | None
        try:
            body = await read_body(scope["headers"], receive, self._limits.max_body_bytes)
            answer = await self._score(job, body, receive)
        except ClientGone:
            answer = None
        except DPIFrameError as error:
            answer = responses.error_answer(error, job.request_id)
        except Exception:
            log.exception("request %s failed", job.request_id)
            answer = responses.internal_error(job.request_id)
        outcome = "cancelled" if answer is None else answer.outcome
        self._metrics.request(job.seen(outcome, self._since(job.started)))
        if answer is not None:
            await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            await send({"type": "http.response.body", "body": answer.body})

    async def _score(self, job: "_Job", body: bytes, receive: Receive) -> Answer:
        served, request = self._parse(body)
        options = request.options
        job.model = served.info.name
        deadline_ms = self._limits.default_deadline_ms if options.deadline_ms is None else options.deadline_ms
        deadline = None if deadline_ms is None else job.started + deadline_ms / 1e3
        before = self._clock()
        check_deadline(deadline, before, "before it was encoded")
        with HangUp(receive):
            block = await _encoded(served, request, len(body))
            job.rows, job.oov_count, job.encode_ms = block.rows, block.oov_count, self._since(before)
            scored = await served.scorer.submit(block, deadline, options.priority)
        job.queue_ms, job.device_ms = scored.queue_ms, scored.device_ms
        total_ms = self._since(job.started)
        timing_ms = {"queue": job.queue_ms, "encode": job.encode_ms, "device": job.device_ms, "total": total_ms}
        return responses.score_answer(served.info, job.request_id, scored.scores, job.oov_count, timing_ms, options.top_k)

    def _since(self, start: float) -> float:
        return (self._clock() - start) * 1e3

    def _parse(self, body: bytes) -> tuple[Served, ScoreInput]:
        """The model that the request is for, and the request in that model's form."""
        if len(self._models) == 1:
            served = find(self._models, None, None)
        else:  # which form it has depends on a key inside: read that one first
            named = addressed(body)
            served = find(self._models, named.model, named.version)
        try:
            request = served.form.parse(body)
        except InputError:
            named = addressed(body)
            find(self._models, named.model, named.version)  # features of another model are best answered with its name
            raise
        return find(self._models, request.model, request.version), request


@dataclass(slots=True)
class _Job:
    """What is known so far of a request."""

    request_id: str
    started: float
    model: str = ""
    rows: int = 0
    oov_count: int = 0
    queue_ms: float = 0.0
    encode_ms: float = 0.0
    device_ms: float = 0.0

    def seen(self, outcome: str, total_ms: float) -> RequestSeen:
        times = (self.queue_ms, self.encode_ms, self.device_ms, total_ms)
        return RequestSeen(self.model, outcome, self.rows, self.oov_count, *times)


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


async def read_body(headers: Iterable[Header], receive: Receive, max_bytes: int) -> bytes:
    """The whole body, never holding more than `max_bytes` and one chunk of it.

    Raises:
        TooLarge: it is longer, or says that it will be.
        UnsupportedMediaType: it is neither JSON nor of no stated type, or it is compressed.
        ClientGone: the connection closed before its end.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > max_bytes):
            raise TooLarge("Content-Length", value.decode(), f"at most {max_bytes}")
        if name == b"content-type":
            kind = value.split(b";", 1)[0].strip().lower()
            if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
                raise UnsupportedMediaType("Content-Type", value.decode("latin-1"), "application/json")
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise UnsupportedMediaType("Content-Encoding", value.decode("latin-1"), "none: bodies are not decompressed here")
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


async def _encoded(served: Served, request: ScoreInput, body_bytes: int) -> RowBlock:
    columns = request.candidates
    values = len(columns) * len(next(iter(columns.values())))
    if values < _ENCODE_ON_LOOP_VALUES and body_bytes < _ENCODE_ON_LOOP_BYTES:
        return served.encode(columns, request.context)
    return await asyncio.to_thread(served.encode, columns, request.context)
