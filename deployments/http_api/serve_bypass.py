"""Answers scoring requests in front of Serve, through the hook that it has for middlewares: its own bookkeeping and FastAPI's
around each would be a third and more of what a small request costs the event loop. Everything else goes on to Serve untouched.

Where it can, the port is taken over from Serve's server, uvicorn: its reading and writing is most of what is left then.
Owns which requests these are, and the count of those that are open, which Serve no longer knows of. Knows no models.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import uvicorn
from starlette.middleware import Middleware

from deployments.http_api.request_body import Header, Receive, Route, Scope, Send

# Headers by which a request asks for something that only Serve does. It takes "-" and "_" in the last for the same.
_FOR_SERVE = {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"} | {
    b"serve%cmultiplexed%cmodel%cid" % dashes for dashes in itertools.product(b"-_", repeat=3)
}


class Taken(Protocol):
    """A port that was taken over."""

    def stop(self) -> None:
        """Nobody else is let in."""

    async def close(self, within_s: float) -> None: ...


class _InItsPlace:
    """What uvicorn closes when it is told to end: it has Serve's moment at which nobody else is let in."""

    sockets = ()

    def __init__(self, taken: Taken) -> None:
        self.close = taken.stop

    async def wait_closed(self) -> None: ...


@dataclass(slots=True, eq=False)
class ServeBypass:
    """The routes of a replica, which owns it. `open`: requests on them that are not answered yet.

    `prefix` is where the application is mounted, without a slash at its end; `loop` the event loop that its scorers belong to.
    `installed`: that of this process's one replica, for Serve calls its hook without any argument. `answers`: what answers at a
    listening socket from now on, if it can, given what gets all that it does not answer itself, mounted where; `taken` is that.
    """

    installed: ClassVar["ServeBypass | None"] = None

    score: Route
    infer: Route
    prefix: str
    loop: asyncio.AbstractEventLoop
    open: int = 0
    answers: Callable[[Route, str, socket.socket], Taken | None] | None = None
    taken: Taken | None = None

    def install(self) -> None:
        """Puts it in front of the HTTP server that Serve starts next in this process."""
        ServeBypass.installed = self

    def route(self, scope: Scope) -> Route | None:
        """The route of a request that needs nothing of Serve."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path, root = scope["path"], scope.get("root_path", "") + self.prefix
        if path == root + "/v1/score":
            route = self.score
        elif path.startswith(root + "/v2/models/") and path.endswith("/infer"):
            route = self.infer
        else:
            return None
        return None if asks_serve(scope["headers"]) else route

    def take(self, server: uvicorn.Server, front: Route) -> None:
        """Has a server that has just begun to listen accept nobody, unless it speaks TLS or nothing answers in its place."""
        sockets = [listening for one in server.servers for listening in one.sockets]
        if self.answers is None or ServeBypass.installed is not self or self.taken is not None:
            return
        if server.config.is_ssl or len(sockets) != 1:
            return
        listening = socket.socket(fileno=os.dup(sockets[0].fileno()))
        self.taken = self.answers(front, server.config.root_path, listening)
        if self.taken is None:
            listening.close()
        else:
            server.servers[0].close()
            server.servers = [_InItsPlace(self.taken)]  # type: ignore[list-item]

    async def close(self, within_s: float) -> None:
        """Waits until no request is open here.

        Serve, when it drains, waits for those that it has seen itself. Its HTTP server waits for its own, but only as long as
        the stop may last beyond the draining window: with `drain_s` for both, not at all.
        """
        give_up = self.loop.time() + within_s
        if self.taken is not None:
            await self.taken.close(within_s)
        while self.open and self.loop.time() < give_up:
            await asyncio.sleep(0.01)


class BypassMiddleware:
    """The outermost middleware of a replica's HTTP server."""

    def __init__(self, app: Route, bypass: ServeBypass) -> None:
        self._app, self._bypass = app, bypass
        if bypass.answers is not None:
            _at_next_start(lambda server: bypass.take(server, self))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bypass = self._bypass
        route = bypass.route(scope)
        if route is None:
            await self._app(scope, receive, send)
            return
        bypass.open += 1
        try:
            if bypass.prefix:
                scope["root_path"] = scope.get("root_path", "") + bypass.prefix  # as Serve does
            await route(scope, receive, send)
        finally:
            bypass.open -= 1


def asks_serve(headers: Iterable[Header]) -> bool:
    """Whether one of a request's headers asks for something that only Serve does."""
    return any(name in _FOR_SERVE for name, _ in headers)


def _at_next_start(then: Callable[[uvicorn.Server], None]) -> None:
    """Once the server that is started next in this process listens, which uvicorn tells nobody."""
    start = uvicorn.Server.startup

    async def started(self: uvicorn.Server, sockets: Any = None) -> None:
        uvicorn.Server.startup = start  # type: ignore[method-assign]
        await start(self, sockets=sockets)
        then(self)

    uvicorn.Server.startup = started  # type: ignore[method-assign]


def middlewares() -> list[Middleware]:
    """Serve's hook. It is called in proxies too, where nothing is in front, and on the event loop of the HTTP server.

    Nor is anything where Serve runs our code on another loop (without throughput mode), traces requests, or times them out.
    """
    bypass = ServeBypass.installed
    if bypass is None or bypass.loop is not asyncio.get_running_loop() or _serve_acts_on_each_request():
        return []
    return [Middleware(BypassMiddleware, bypass=bypass)]


def _serve_acts_on_each_request() -> bool:
    # Neither has a public name. The first is `http_options.request_timeout_s` of the cluster, which our launcher never sets.
    from ray.serve._private.tracing_utils import is_tracing_enabled
    from ray.serve.context import _get_global_client

    return bool(_get_global_client().http_config.request_timeout_s) or is_tracing_enabled()
