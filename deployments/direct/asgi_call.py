"""Every other request of the direct port: one call of the ASGI application that Serve mounts too. Its answer is sent whole."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from deployments.http_api import answers
from deployments.http_api.answers import Answer
from deployments.http_api.request_body import Header, Route, Scope

log = logging.getLogger(__name__)

_HOP = {b"connection", b"transfer-encoding", b"date"}  # the port's own


class AsgiCall:
    """One that is open. `answered` is called once, unless the client hangs up first."""

    def __init__(self, app: Route, scope: Scope, body: bytes, answered: Callable[[Answer, bool], None]) -> None:
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._answered, self._scope = answered, scope
        self._status, self._headers, self._parts = 0, list[Header](), list[bytes]()
        self._ended = False
        self._task = asyncio.create_task(self._called(app))

    def hang_up(self) -> None:
        self._gone.set()

    async def _called(self, app: Route) -> None:
        request_id = None
        try:
            await app(self._scope, self._receive, self._send)
        except Exception:  # what the application could not answer itself, with a trace of its own
            request_id = answers.request_id_of(self._scope["headers"])
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
        if not self._ended and not self._gone.is_set():
            self._end(answers.internal_error(request_id or answers.request_id_of(self._scope["headers"])), close=True)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], [(bytes(k).lower(), bytes(v)) for k, v in message["headers"]]
            return
        self._parts.append(message.get("body", b""))
        if message.get("more_body") or self._ended or self._gone.is_set():
            return
        close = any(h == (b"connection", b"close") for h in self._headers)
        headers = [h for h in self._headers if h[0] not in _HOP]
        body = b"".join(self._parts)
        if not any(name == b"content-length" for name, _ in headers):
            headers.append((b"content-length", b"%d" % len(body)))
        if not any(name == b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", answers.request_id_of(self._scope["headers"]).encode("ascii")))
        self._end(Answer(self._status, tuple(headers), b"" if self._scope["method"] == "HEAD" else body, "ok"), close)

    def _end(self, answer: Answer, close: bool) -> None:
        self._ended = True
        self._answered(answer, close)
