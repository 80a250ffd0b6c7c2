"""The page at `/` and the files that it loads, from this package alone. They are the same for every service and tell nothing of
this one: what they show they ask for, with the visitor's token where one is needed. Knows no FastAPI.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The browser runs what comes from here and nothing else, makes no markup from text, and sends nothing to another host.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """The page and its files, read once."""
    routes = []
    for file in sorted(_FOLDER.iterdir()):
        # Addresses within the page are relative, so that they hold under any prefix and behind any proxy.
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        routes.append(Route(path, _served(file.read_bytes(), _TYPES[file.suffix])))
    return routes


def _served(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return answer
