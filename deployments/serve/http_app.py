"""The FastAPI application of a replica: the score route, the models it serves, health, the status page, the documentation.

Turns every error, FastAPI's own included, into the one error form. Knows no Ray.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from deployments.access.gate import Gate
from deployments.config import Limits
from deployments.http_api.answers import Answer, error_answer, internal_error, plain_error, request_id_of
from deployments.http_api.docs_page import docs_routes
from deployments.http_api.gated import OPEN, Gated
from deployments.http_api.score_route import ScoreRoute
from deployments.metrics import RequestSeen, ShadowSeen
from deployments.protocol.inference import Inference
from deployments.protocol.rest import InferRoute
from deployments.scoring.catalog import Catalog
from deployments.scoring.scoring import Scoring
from deployments.scoring.served_model import ModelList
from deployments.scoring.shadow import Shadows
from deployments.scoring.statistics import Statistics
from deployments.scoring.watchers import Watchers
from deployments.serve.openapi import TAGS, error_answers, name_the_bearer, protocol_pages, score_page
from deployments.status.page_routes import page_routes
from deployments.status.profiles import Profiles
from deployments.status.recent import Recent, RecentAnswer
from deployments.telemetry.node_metrics import CONTENT_TYPE
from dpiframe_core.engine.buckets import BatchSizes
from dpiframe_core.errors import DPIFrameError, Unavailable, shown

log = logging.getLogger(__name__)

_NOBODY = Watchers()
_CODES = {404: "not_found", 405: "method_not_allowed"}
_MODEL_ERRORS = {404: "no such model", 422: "several models are served, and none is named"}


def build_app(
    models: Catalog,
    limits: Limits,
    on_request: Callable[[RequestSeen], None] = lambda seen: None,
    gate: Gate | None = None,
    metrics_page: Callable[[], Awaitable[bytes]] | None = None,
    profiles: str | None = None,
    watchers: Watchers = _NOBODY,
    on_shadow: Callable[[ShadowSeen], None] = lambda seen: None,
    lifecycle: APIRouter | None = None,
) -> FastAPI:
    """An application over `models`, which may change while it runs.

    `gate`: who may ask; None: anybody. `metrics_page` writes what `/metrics` answers; without it there is no such route.
    `profiles`: a folder of stored ones. `watchers` see single requests. `lifecycle`: the routes that change the models.
    """
    recent, stored = Recent(on_request), Profiles(profiles)
    counted = Statistics(recent.request)
    app = FastAPI(title="DPIFrame", summary="CTR model inference", redirect_slashes=False, docs_url=None, redoc_url=None)
    shadows = Shadows(models.shadow_of, on_shadow, time.monotonic)
    scoring = Scoring(limits, counted.request, watchers, shadows=shadows)
    inference = Inference(models, scoring, counted)
    app.state.inference = inference
    if gate is not None:
        app.add_middleware(Gated, gate=gate)
    # First, since the router asks one route after the other.
    score, infer = ScoreRoute(models, scoring, gate), InferRoute(inference, gate)
    app.state.score, app.state.infer = score, infer
    below_v2 = Mount("/v2", app=infer)
    below_v2.path_regex = re.compile(below_v2.path_regex.pattern, re.DOTALL)  # a model's name may be asked for with a line feed
    app.router.routes[:0] = [
        below_v2,
        Route("/v2", infer),  # the bare path, which a mount leaves out
        Route("/v1/score", score, methods=["POST"]),
        *docs_routes(),
        *page_routes(),
    ]

    @app.get("/v1/models", tags=["models"])
    async def list_models() -> ModelList:
        """Every model served here, with the features that a request must give."""
        return ModelList(models=[served.info for served in models.live.values()])

    @app.get("/v1/batch-sizes", tags=["models"], responses=error_answers(_MODEL_ERRORS))
    async def batch_sizes(model: str | None = None, version: str | None = None) -> BatchSizes:
        """How many batches of each size this replica has run since its start: what `dpiframe tune` finds buckets from."""
        return models.find(model, version).batch_sizes()

    @app.get("/v1/recent", tags=["health"])
    async def lately(asked: Request) -> RecentAnswer:
        """What this replica answered in the last two minutes, second by second: the status page draws it."""
        if gate is not None:
            gate.require(asked.scope["headers"], "metrics")
        return recent.answer({name: served.info.version for name, served in models.live.items()})

    @app.get("/v1/profile", tags=["models"], responses=error_answers(_MODEL_ERRORS))
    async def profile(model: str | None = None) -> Response:
        """The stored profile of a model, as `dpiframe profile` wrote it: a Chrome trace."""
        name = models.find(model, None).info.name
        return Response(await asyncio.to_thread(stored.read, name), media_type="application/json")

    @app.get("/livez", tags=["health"])
    async def live() -> dict[str, str]:
        """The process answers."""
        return {"status": "live"}

    @app.get("/readyz", tags=["health"])
    async def ready() -> Response:
        """Every model takes requests."""
        closed = [name for name, served in models.live.items() if not served.scorer.accepting]
        if closed or not models.live:
            raise Unavailable(f"models: got {closed or 'none'} not accepting requests, expected all to")
        return Response(b'{"status":"ready"}', media_type="application/json")

    if lifecycle is not None:
        app.include_router(lifecycle)

    if metrics_page is not None:

        @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
        async def metrics(asked: Request) -> Response:
            """This application's metrics of all its processes, for Prometheus; up to 15 seconds old."""
            if gate is not None:
                gate.require(asked.scope["headers"], "metrics")
            return Response(await metrics_page(), headers={"content-type": CONTENT_TYPE})

    @app.exception_handler(DPIFrameError)
    async def raised(request: Request, error: DPIFrameError) -> Response:
        return _response(error_answer(error, request_id_of(request.scope["headers"])))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code, "http_error")
        headers = tuple((k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items())
        # Not request.url, which raises for some Host headers.
        message = f"route: got {request.method} {shown(request.scope['path'])}, expected one of this server (see /docs)"
        return _response(plain_error(error.status_code, code, message, request_id_of(request.scope["headers"]), headers))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        request_id = request_id_of(request.scope["headers"])
        log.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
        return _response(internal_error(request_id))

    app.openapi = lambda: _openapi(app, models, gate is not None)  # type: ignore[method-assign]
    return app


def _response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = list(answer.headers)
    return response


def _openapi(app: FastAPI, models: Catalog, guarded: bool) -> dict[str, Any]:
    """FastAPI's document, and in it the routes that FastAPI does not know. Made anew when the models have changed."""
    if app.openapi_schema and app.state.documented == models.changes:
        return app.openapi_schema
    app.state.documented = models.changes
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=TAGS)
    for paths, schemas in (score_page(models.live), protocol_pages()):
        document["paths"] |= paths
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    if guarded:
        name_the_bearer(document, OPEN)
    app.openapi_schema = document
    return document
