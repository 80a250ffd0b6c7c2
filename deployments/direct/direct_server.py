"""The direct port of one process: rounds of requests in, answers out, and the end of both when the replica stops."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from email.utils import formatdate
from functools import partial
from http import HTTPStatus

from deployments.batching.scorer import Scorer
from deployments.config import Limits
from deployments.direct.asgi_call import AsgiCall
from deployments.direct.express import Express
from deployments.direct.listener import GONE, HEAD_MS, Received, body_fault, most_connections, open_listener
from deployments.direct.request_head import RequestHead, header_lines, read_head
from deployments.direct.scoring_request import ScoringRequest, ScoringRoutes, scorer_of
from deployments.http_api import answers
from deployments.http_api.answers import Answer
from deployments.http_api.request_body import Header, Route
from deployments.http_api.score_route import ScoreRoute
from deployments.protocol import rest
from deployments.protocol.rest import InferRoute

log = logging.getLogger(__name__)

_TICK_S = 0.1  # so often, at least, clients that are too slow are looked for, and what C has answered is counted
_FLUSH = 16  # requests after which a round has what it has sent looked at
_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}
_EXPECTED = {
    408: f"it within {HEAD_MS // 1000} s of their first byte",
    417: "100-continue or none",
    431: "fewer",
    503: "fewer, or one request after the other",
}
_CODES = {400: "bad_request", 408: "slow_headers", 417: "expectation_failed", 431: "headers_too_large", 503: "unavailable"}


class DirectServer:
    """Answers on connections that `adopt` gives it. Make and use it on one event loop.

    `app` is mounted at `prefix` (no slash at its end) and gets every request but those of `score` and `infer` that are small.
    With `at_serve`, where Serve's server is mounted, it is what Serve has around that one: it also gets every other path, and
    what asks Serve for something. `listeners`: how many this process has, which share its descriptors.

    Raises:
        ConfigError: as `open_listener`.
    """

    def __init__(
        self,
        app: Route,
        score: ScoreRoute,
        infer: InferRoute,
        limits: Limits,
        prefix: str = "",
        listeners: int = 1,
        at_serve: str | None = None,
    ) -> None:
        self._app, self._limits, self._prefix, self._at_serve = app, limits, prefix, at_serve
        self._loop = asyncio.get_running_loop()
        self._listener = open_listener(limits, most_connections(listeners))
        self._routes = ScoringRoutes(score, infer, self._scored)
        self._express = Express(self._listener, infer, self._round_soon)
        self._open: dict[int, ScoringRequest | AsgiCall] = {}
        self._answers: list[tuple[int, bytes, bool]] = []
        self._in_round = self._due = self._draining = False
        self.counted: Callable[[int], None] | None = None  # is told how many connections there are, after each round
        self._fd = self._listener.fileno()
        self._loop.add_reader(self._fd, self._round)
        self._timer = self._loop.call_soon(self._tick)

    @property
    def connections(self) -> int:
        return self._listener.open

    @property
    def full(self) -> bool:
        """Whether there are as many as may be."""
        return self._listener.open >= self._listener.most

    def accept(self, listening: int, most: int) -> list[int]:
        """At most so many of the clients that wait at a socket, and no more than may be adopted."""
        return self._listener.accept(listening, min(most, self._listener.most - self._listener.open))

    def adopt(self, clients: Sequence[int]) -> int:
        """Takes connections over; how many: those behind stay the caller's, as there are as many as may be."""
        return self._listener.add(clients)

    async def drain(self, within_s: float) -> None:
        """Answers what is open, each with the end of its connection; then, or after `within_s` seconds, closes all."""
        self._draining = True
        self._round()  # what has come is read, and so is no idle connection's
        self._listener.drain()
        give_up = self._loop.time() + within_s
        while self._listener.open and self._loop.time() < give_up:
            await asyncio.sleep(0.01)
        self.close()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._timer.cancel()
        for request in list(self._open.values()):
            request.hang_up()
        self._open.clear()
        self._listener.close()
        self._express.close()

    def _tick(self) -> None:
        self._date = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"
        self._listener.date(self._date)
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._round()
        self._express.tick()

    def _round(self) -> None:
        self._in_round = True
        self._express.follow()
        scorers: set[Scorer] = set()
        try:
            for count, fields in enumerate(self._listener.round(), 1):
                scorer = self._begun(Received(*fields))
                if scorer is not None:
                    scorers.add(scorer)
                if count % _FLUSH == 0:
                    _flush(scorers)
            _flush(scorers)
            if self._listener.ended_count:
                for key, answer in self._express.refused():
                    self._put(key, answer, False)
        finally:
            self._in_round = False
            self._write()
            if self.counted is not None:
                self.counted(self._listener.open)
        if self._listener.due:
            self._round_soon()

    def _round_soon(self) -> None:
        self._loop.call_soon(self._round)

    def _begun(self, received: Received) -> Scorer | None:
        """`_taken`; what nobody expected costs this request alone, and not the others of its round."""
        try:
            return self._taken(received)
        except Exception:
            request_id = secrets.token_hex(8)
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
            self._open.pop(received.key, None)
            self._put(received.key, answers.internal_error(request_id), True)
            return None

    def _taken(self, received: Received) -> Scorer | None:
        """Begins a request; the scorer that has got it."""
        key, fault = received.key, received.fault
        if fault is not None and (request := self._open.pop(key, None)) is not None:
            request.hang_up()
            return None
        if not received.head:  # what came is no request, or the client of one that is answered has gone
            if fault is not None and fault != GONE:
                self._put(key, _unreadable(fault), True)
            return None
        head = read_head(received.head, self._prefix)
        headers = head.headers
        if received.apart:
            headers = headers + header_lines(received.apart.removesuffix(b"\r\n").split(b"\r\n"))
        if fault is not None and fault[0].isdigit():
            self._put(key, _unreadable(fault, head, headers), True)
            return None
        if not (self._at_serve is not None and head.for_serve) and self._routes.takes(head, received):
            request = self._routes.begin(head, headers, received)
            if request is not None:
                scorer = scorer_of(request)
                if scorer is not None:
                    self._open[key] = request
                    self._express.learn(head, received, request)
                return scorer
        self._call(head, headers, received)
        return None

    def _call(self, head: RequestHead, headers: list[Header], received: Received) -> None:
        key, close = received.key, received.close
        if received.fault is not None:
            if received.fault != GONE:
                self._put(key, self._bad_body(head, headers, received.fault), True)
        elif head.path is None and self._at_serve is None:
            message = "route: got a path outside of this service, expected one below its prefix"
            answer = answers.plain_error(404, "not_found", message, answers.request_id_of(headers))
            self._put(key, answer._replace(body=b"") if head.method == "HEAD" else answer, close)
        else:
            root = self._at_serve
            scope = head.scope(self._prefix, headers) if root is None else head.scope_at_serve(root, headers)
            self._open[key] = AsgiCall(self._app, scope, received.body, partial(self._called, key, close))

    def _bad_body(self, head: RequestHead, headers: list[Header], fault: str) -> Answer:
        refusal = rest.error_answer if head.of_protocol else answers.error_answer
        return refusal(body_fault(fault, self._limits), answers.request_id_of(headers))

    def _called(self, key: int, close: bool, answer: Answer, closes: bool) -> None:
        self._open.pop(key, None)
        self._put(key, answer, close or closes)

    def _scored(self, request: ScoringRequest, answer: Answer) -> None:
        self._open.pop(request.key, None)
        self._put(request.key, answer, request.close)

    def _put(self, key: int, answer: Answer, close: bool) -> None:
        parts = [_LINES.get(answer.status) or b"HTTP/1.1 %d \r\n" % answer.status, self._date]
        for name, value in answer.headers:
            if name == b"connection":
                close = True
            else:
                parts += name, b": ", value, b"\r\n"
        close = close or self._draining
        parts += b"connection: close\r\n\r\n" if close else b"\r\n", answer.body
        self._answers.append((key, b"".join(parts), close))
        if not self._in_round and not self._due:  # all answers of a batch are written at once
            self._due = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._due = False
        answers_, self._answers = self._answers, []
        if answers_ and self._listener.answer(answers_):
            self._round_soon()


def _flush(scorers: Iterable[Scorer]) -> None:
    for scorer in scorers:
        scorer.flush()


def _unreadable(fault: str, head: RequestHead | None = None, headers: Iterable[Header] = ()) -> Answer:
    """What came is no request. `head`: of one whose head is one."""
    status, request_id = int(fault[:3]), answers.request_id_of(headers)
    message = f"request: got {fault[4:]}, expected {_EXPECTED.get(status, 'HTTP/1.1 as RFC 9112 has it')}"
    refusal = rest.plain_error if head is not None and head.of_protocol else answers.plain_error
    return refusal(status, _CODES[status], message, request_id)
