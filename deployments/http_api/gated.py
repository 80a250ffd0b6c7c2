"""The gate in front of an app, as an ASGI middleware: whatever it serves takes a token, but for health and the page.

The routes that score, and all of `/v2`, ask the gate themselves, since they are also called without the app (`serve_bypass`).
"""

from deployments.access.gate import Gate
from deployments.http_api import answers
from deployments.http_api.request_body import Receive, Route, Scope, Send
from dpiframe_core.errors import DPIFrameError

OPEN = ("/livez", "/readyz")
# The status page and its files, the same for every service; a browser that opens a page sends no token.
_PAGE, _PAGE_FILES = "/", "/page/"


class Gated:
    """Outside of an app's router. Paths count from where the app is mounted."""

    def __init__(self, app: Route, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _let_through(scope["path"].removeprefix(scope.get("root_path", ""))):
            try:
                self._gate.require(scope["headers"])
            except DPIFrameError as error:
                await answers.send_answer(answers.error_answer(error, answers.request_id_of(scope["headers"])), send)
                return
        await self._app(scope, receive, send)


def _let_through(path: str) -> bool:
    return path in OPEN or path in (_PAGE, "/v1/score", "/v2") or path.startswith((_PAGE_FILES, "/v2/"))
