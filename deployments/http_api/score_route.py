"""`POST /v1/score` as a bare ASGI application: bytes in, scores out. FastAPI's own body handling costs more than the scoring.

Owns the forms of the body (JSON, or an Arrow stream) and what becomes of a client that hangs up. Knows no FastAPI and no Ray.
"""

import asyncio
import logging
from collections.abc import Iterable

from deployments.access.gate import Gate
from deployments.http_api import answers
from deployments.http_api.answers import Answer
from deployments.http_api.arrow_body import ArrowRequest, read_stream
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
from deployments.http_api.score_list import LISTED, check_rows, fault_body, is_list, items_of, list_answer
from deployments.scoring.catalog import Catalog
from deployments.scoring.faults import NotJson
from deployments.scoring.job import Job
from deployments.scoring.request_form import ScoreInput, addressed
from deployments.scoring.scoring import Scoring
from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import DPIFrameError, InputError
from dpiframe_core.features.arrow_columns import rows_in
from dpiframe_core.features.row_block import Floats

log = logging.getLogger(__name__)

_READ_ON_LOOP_BYTES = 512 * 1024  # of an Arrow stream, whose checks take some milliseconds a megabyte


class ScoreRoute:
    """The route, for all models of the process, which may change while it runs. `gate`: who may ask; None: anybody."""

    def __init__(self, models: Catalog, scoring: Scoring, gate: Gate | None = None) -> None:
        self._models = models
        self._scoring = scoring
        self._gate = gate
        self._max_rows = scoring.limits.max_rows_per_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._scoring.begin(answers.request_id_of(scope["headers"]), scope["headers"])
        answer: Answer | None
        try:
            kind = self.begun(scope["headers"])
            body = await read_body(scope["headers"], receive, self._scoring.limits)
            self._scoring.over(job, "receive")
            if kind == JSON and is_list(body):
                answer = await self._score_list(job, body, scope["headers"], receive)
            else:
                answer = await self._score(job, body, kind, receive)
        except ClientGone:
            answer = None
        except DPIFrameError as error:
            answer = answers.error_answer(error, job.request_id)
        except Exception:
            log.exception("request %s failed", job.request_id, extra={"request_id": job.request_id})
            answer = answers.internal_error(job.request_id)
        if answer is None or answer.outcome != LISTED:
            self._scoring.finish(job, "cancelled" if answer is None else answer.outcome)
        if answer is not None:
            await answers.send_answer(answer, send)

    async def _score(self, job: Job, body: bytes, kind: str, receive: Receive) -> Answer:
        if kind == ARROW and len(body) >= _READ_ON_LOOP_BYTES:
            served, request = self._of_arrow(job, await asyncio.to_thread(self._read_stream, body))
        else:
            served, request = self.parsed(job, kind, body)
        with HangUp(receive):
            scores = await self._scores(job, served, request, len(body))
        timing_ms = job.timing_ms(self._scoring.total_ms(job))
        return answers.score_answer(served.info, job, scores, timing_ms, request.options.top_k)

    async def _scores(self, job: Job, served: ServedModel, request: ScoreInput, body_bytes: int) -> Floats:
        job.model, job.version = served.info.name, served.info.version
        job.given = request.candidates, request.context
        scored = await self._scoring.score(
            job,
            served,
            lambda one: request.encoded(one.encode),
            deadline_ms=request.options.deadline_ms,
            priority=request.options.priority,
            values=values_of(request),
            body_bytes=body_bytes,
        )
        return scored.scores

    async def _score_list(self, job: Job, body: bytes, headers: list[Header], receive: Receive) -> Answer:
        """Scores each request of the list by a job of its own; what is wrong with one is told in its place."""
        bodies: list[object] = []
        sound: list[tuple[int, Job, ServedModel, ScoreInput, int]] = []
        rows = 0
        for i, item in enumerate(items_of(body)):
            one = self._scoring.begin(f"{job.request_id}.{i}", headers)
            one.started = job.started
            bodies.append(None)
            try:
                served, request = self._parse(one, item)
            except NotJson:
                raise
            except DPIFrameError as error:
                bodies[i] = fault_body(error, i, one.request_id)
                self._scoring.finish(one, error.code)
                continue
            sound.append((i, one, served, request, len(item)))
            rows += rows_in(request.candidates)
            check_rows(rows, self._max_rows)
        with HangUp(receive):
            scored = await asyncio.gather(*(self._score_one(*parts) for parts in sound))
        for (i, *_), each in zip(sound, scored, strict=True):
            bodies[i] = each
        return list_answer(bodies, job.request_id)

    async def _score_one(self, place: int, job: Job, served: ServedModel, request: ScoreInput, body_bytes: int) -> object:
        outcome = "cancelled"
        try:
            scores = await self._scores(job, served, request, body_bytes)
            outcome = "ok"
            timing_ms = job.timing_ms(self._scoring.total_ms(job))
            return answers.score_body(served.info, job, scores, timing_ms, request.options.top_k)
        except DPIFrameError as error:
            outcome = error.code
            return fault_body(error, place, job.request_id)
        except Exception as error:
            outcome = "internal"
            log.exception("request %s failed", job.request_id, extra={"request_id": job.request_id})
            return fault_body(error, place, job.request_id)
        finally:
            self._scoring.finish(job, outcome)

    def begun(self, headers: Iterable[Header]) -> str:
        """The media type of a request that may ask. Raises DPIFrameError for what is wrong before the body is read."""
        if self._gate is not None:
            self._gate.require(headers, "score")
        return media_type(headers, (JSON, ARROW))

    def parsed(self, job: Job, kind: str, body: bytes) -> tuple[ServedModel, ScoreInput]:
        """Who scores the request, and the request in that version's form; to be sent there in the same turn."""
        return self._of_arrow(job, self._read_stream(body)) if kind == ARROW else self._parse(job, body)

    def _parse(self, job: Job, body: bytes) -> tuple[ServedModel, ScoreInput]:
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

    def _read_stream(self, body: bytes) -> ArrowRequest:
        limits = self._scoring.limits
        return read_stream(body, limits.max_rows_per_request, limits.max_body_bytes)

    def _of_arrow(self, job: Job, stream: ArrowRequest) -> tuple[ServedModel, ScoreInput]:
        named = addressed(stream.rest)
        found = self._models.find(named.model, named.version)
        request = found.form.parse_rest(stream.rest, stream.candidates)
        served = self._chosen(job, found, request)
        if _read_alike(served, found):
            return served, request
        return served, served.form.parse_rest(stream.rest, stream.candidates)

    def _chosen(self, job: Job, found: ServedModel, request: ScoreInput) -> ServedModel:
        return self._models.choose(found, request.version, request.options.key, request.context.get, job.request_id)


def values_of(request: ScoreInput) -> int:
    """About how many there are to encode."""
    return len(request.candidates) * rows_in(request.candidates)


def _read_alike(one: ServedModel, other: ServedModel) -> bool:
    return one is other or one.form.schema == other.form.schema
