"""Answers scoring requests in front of Serve, through the hook that it has for middlewares: its own bookkeeping and FastAPI's
around each would be a third and more of what a small request costs the event loop. Everything else goes on to Serve untouched.

Owns which requests these are, and the count of those that are open, which Serve no longer knows of. Knows no models.
"""

import asyncio
import itertools
from dataclasses import dataclass
from typing import ClassVar

from starlette.middleware import Middleware

from deployments.http_api.request_body import Receive, Route, Scope, Send

# Headers by which a request asks for something that only Serve does. It takes "-" and "_" in the last for the same.
_FOR_SERVE = {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"} | {
    b"serve%cmultiplexed%cmodel%cid" % dashes for dashes in itertools.product(b"-_", repeat=3)
}


@dataclass(slots=True, eq=False)
class ServeBypass:
    """The routes of a replica, which owns it. `open`: requests on them that are not answered yet.

    `prefix` is where the application is mounted, without a slash at its end; `loop` the event loop that its scorers belong to.
    `installed`: that of this process's one replica, for Serve calls its hook without any argument.
    """

    installed: ClassVar["ServeBypass | None"] = None

    score: Route
    infer: Route
    prefix: str
    loop: asyncio.AbstractEventLoop
    open: int = 0

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
        return None if any(name in _FOR_SERVE for name, _ in scope["headers"]) else route

    async def close(self, within_s: float) -> None:
        """Waits until no request is open here.

        Serve, when it drains, waits for those that it has seen itself. Its HTTP server waits for these too, but only as long as
        the stop may last beyond the draining window: with `drain_s` for both, not at all.
        """
        give_up = self.loop.time() + within_s
        while self.open and self.loop.time() < give_up:
            await asyncio.sleep(0.01)


class BypassMiddleware:
    """The outermost middleware of a replica's HTTP server."""

    def __init__(self, app: Route, bypass: ServeBypass) -> None:
        self._app, self._bypass = app, bypass

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
