"""`POST /v1/score` as a bare ASGI application: bytes in, scores out. FastAPI's own body handling costs more than the scoring.

Owns the forms of the body (JSON, or an Arrow stream) and what becomes of a client that hangs up. Knows no FastAPI and no Ray.
"""

import asyncio
import logging

from deployments.access.gate import Gate
from deployments.http_api import answers
from deployments.http_api.answers import Answer
from deployments.http_api.arrow_body import read_stream
from deployments.http_api.request_body import ARROW, JSON, ClientGone, HangUp, Receive, Scope, Send, media_type, read_body
from deployments.scoring.catalog import Catalog
from deployments.scoring.job import Job
from deployments.scoring.request_form import ScoreInput, addressed
from deployments.scoring.scoring import Scoring
from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import DPIFrameError, InputError

log = logging.getLogger(__name__)

_READ_ON_LOOP_BYTES = 512 * 1024  # of an Arrow stream, whose checks take about a millisecond a megabyte


class ScoreRoute:
    """The route, for all models of the process, which may change while it runs. `gate`: who may ask; None: anybody."""

    def __init__(self, models: Catalog, scoring: Scoring, gate: Gate | None = None) -> None:
        self._models = models
        self._scoring = scoring
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._scoring.begin(answers.request_id_of(scope["headers"]), scope["headers"])
        answer: Answer | None
        try:
            if self._gate is not None:
                self._gate.require(scope["headers"], "score")
            kind = media_type(scope["headers"], (JSON, ARROW))
            body = await read_body(scope["headers"], receive, self._scoring.limits)
            self._scoring.over(job, "receive")
            answer = await self._score(job, body, kind, receive)
        except ClientGone:
            answer = None
        except DPIFrameError as error:
            answer = answers.error_answer(error, job.request_id)
        except Exception:
            log.exception("request %s failed", job.request_id, extra={"request_id": job.request_id})
            answer = answers.internal_error(job.request_id)
        self._scoring.finish(job, "cancelled" if answer is None else answer.outcome)
        if answer is not None:
            await answers.send_answer(answer, send)

    async def _score(self, job: Job, body: bytes, kind: str, receive: Receive) -> Answer:
        served, request = await self._read_arrow(job, body) if kind == ARROW else self._parse(job, body)
        options, columns = request.options, request.candidates
        job.model, job.version = served.info.name, served.info.version
        job.given = columns, request.context
        with HangUp(receive):
            scored = await self._scoring.score(
                job,
                served,
                lambda one: one.encode(columns, request.context),
                deadline_ms=options.deadline_ms,
                priority=options.priority,
                values=len(columns) * len(next(iter(columns.values()))),
                body_bytes=len(body),
            )
        timing_ms = job.timing_ms(self._scoring.total_ms(job))
        return answers.score_answer(served.info, job, scored.scores, timing_ms, options.top_k)

    def _parse(self, job: Job, body: bytes) -> tuple[ServedModel, ScoreInput]:
        """Who scores the request, and the request in that version's form."""
        if len(self._models.live) == 1:
            found = self._models.find(None, None)
        else:  # which form it has depends on a key inside: read that one first
            named = addressed(body)
            found = self._models.find(named.model, named.version)
        try:
            request = found.form.parse(body)
        except InputError:
            named = addressed(body)  # features of another model or version: in its form they may be right
            other = self._models.find(named.model, named.version)
            if other is found:
                raise
            return other, other.form.parse(body)
        served = self._chosen(job, self._models.find(request.model, request.version), request)
        return served, request if _read_alike(served, found) else served.form.parse(body)

    async def _read_arrow(self, job: Job, body: bytes) -> tuple[ServedModel, ScoreInput]:
        max_rows = self._scoring.limits.max_rows_per_request
        if len(body) < _READ_ON_LOOP_BYTES:
            stream = read_stream(body, max_rows)
        else:
            stream = await asyncio.to_thread(read_stream, body, max_rows)
        named = addressed(stream.rest)
        found = self._models.find(named.model, named.version)
        request = found.form.parse_rest(stream.rest, stream.candidates)
        served = self._chosen(job, found, request)
        if _read_alike(served, found):
            return served, request
        return served, served.form.parse_rest(stream.rest, stream.candidates)

    def _chosen(self, job: Job, found: ServedModel, request: ScoreInput) -> ServedModel:
        return self._models.choose(found, request.version, request.options.key, request.context.get, job.request_id)


def _read_alike(one: ServedModel, other: ServedModel) -> bool:
    return one is other or one.form.schema == other.form.schema
