"""`POST /v1/score` as a bare ASGI application: bytes in, scores out. FastAPI's own body handling costs more than the scoring.

Owns the forms of the body (JSON, or an Arrow stream) and what becomes of a client that hangs up. Knows no FastAPI and no Ray.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from deployments.access.gate import Gate
from deployments.http_api import answers
from deployments.http_api.answers import Answer
from deployments.http_api.arrow_body import read_stream
from deployments.http_api.request_body import (
    ARROW,
    JSON,
    ClientGone,
    HangUp,
    Header,
    Receive,
    Scope,
    Send,
    media_type,
    read_body,
)
from deployments.scoring.job import Job
from deployments.scoring.request_form import ScoreInput, addressed
from deployments.scoring.scoring import Scoring
from deployments.scoring.served_model import ServedModel, find
from dpiframe_core.errors import DPIFrameError, InputError

log = logging.getLogger(__name__)

_READ_ON_LOOP_BYTES = 512 * 1024  # of an Arrow stream, whose checks take about a millisecond a megabyte


class ScoreRoute:
    """The route, for all models of the process. `models` may change while it runs. `gate`: who may ask; None: anybody."""

    def __init__(self, models: Mapping[str, ServedModel], scoring: Scoring, gate: Gate | None = None) -> None:
        self._models = models
        self._scoring = scoring
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._scoring.begin(answers.request_id_of(scope["headers"]), scope["headers"])
        answer: Answer | None
        try:
            kind = self.begun(scope["headers"])
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
        if kind == ARROW and len(body) >= _READ_ON_LOOP_BYTES:
            served, request = await asyncio.to_thread(self._read_arrow, body)
        else:
            served, request = self.parsed(kind, body)
        options, columns = request.options, request.candidates
        job.model, job.version = served.info.name, served.info.version
        job.given = columns, request.context
        with HangUp(receive):
            scored = await self._scoring.score(
                job,
                served,
                partial(served.encode, columns, request.context),
                deadline_ms=options.deadline_ms,
                priority=options.priority,
                values=values_of(request),
                body_bytes=len(body),
            )
        timing_ms = job.timing_ms(self._scoring.total_ms(job))
        return answers.score_answer(served.info, job, scored.scores, timing_ms, options.top_k)

    def begun(self, headers: Iterable[Header]) -> str:
        """The media type of a request that may ask. Raises DPIFrameError for what is wrong before the body is read."""
        if self._gate is not None:
            self._gate.require(headers, "score")
        return media_type(headers, (JSON, ARROW))

    def parsed(self, kind: str, body: bytes) -> tuple[ServedModel, ScoreInput]:
        """The model that the request is for, and the request in that model's form."""
        return self._read_arrow(body) if kind == ARROW else self._parse(body)

    def _parse(self, body: bytes) -> tuple[ServedModel, ScoreInput]:
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

    def _read_arrow(self, body: bytes) -> tuple[ServedModel, ScoreInput]:
        stream = read_stream(body, self._scoring.limits.max_rows_per_request)
        named = addressed(stream.rest)
        served = find(self._models, named.model, named.version)
        return served, served.form.parse_rest(stream.rest, stream.candidates)


def values_of(request: ScoreInput) -> int:
    """About how many there are to encode."""
    return len(request.candidates) * len(next(iter(request.candidates.values())))
