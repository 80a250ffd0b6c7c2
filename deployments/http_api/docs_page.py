"""`/docs`: the API's description as a page of Swagger UI, whose script and styles come from this host. Knows no FastAPI.

The files are those of the wheel `fastapi-offline`; none of its code is imported. Without it the page says so in a line.
"""

from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

_WHEEL = "fastapi_offline"
_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
# Addresses are relative, so that they hold under any prefix and behind any proxy.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>DPIFrame</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
# validatorUrl: by default Swagger UI has a public service validate the document.
_START = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: null, layout: "BaseLayout",
  presets: [SwaggerUIBundle.presets.apis]
})
"""
# The browser itself sends nothing of this page to another host, whatever the script is.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MISSING = "The API is described in openapi.json, beside this page. To read it here: pip install fastapi-offline\n"


def docs_routes() -> list[Route]:
    """The page, and what it loads; or a line of text where the wheel or a file of it is not there."""
    spec = find_spec(_WHEEL)
    folder = Path(spec.origin).parent / "static" if spec is not None and spec.origin else Path()
    files = {name: folder / name for name in _FILES}
    if not all(file.is_file() for file in files.values()):
        return [Route("/docs", lambda request: PlainTextResponse(_MISSING))]

    async def page(request: Request) -> Response:
        return Response(_PAGE, media_type="text/html", headers={"content-security-policy": _POLICY})

    async def start(request: Request) -> Response:
        return Response(_START, media_type="text/javascript")

    def served(file: Path) -> Route:
        async def content(request: Request) -> Response:
            return FileResponse(file)

        return Route(f"/docs/{file.name}", content)

    return [Route("/docs", page), Route("/docs/start.js", start), *map(served, files.values())]
