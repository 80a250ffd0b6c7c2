"""A scoring request on the direct port, from its bytes to its answer without a task: the steps are those of the routes of
`http_api` and `protocol`, which say what is right and what is not.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deployments.batching.scorer import Scored, Scorer
from deployments.direct.listener import GONE, Received, body_fault
from deployments.direct.request_head import RequestHead
from deployments.http_api import answers
from deployments.http_api.answers import Answer
from deployments.http_api.request_body import JSON, Header, checked_encoding
from deployments.http_api.score_list import is_list
from deployments.http_api.score_route import ScoreRoute, values_of
from deployments.protocol import rest
from deployments.protocol.request import InferRequest, parse
from deployments.protocol.rest import InferRoute
from deployments.scoring.bodies import Options
from deployments.scoring.job import Job
from deployments.scoring.scoring import encodes_on_loop
from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import DPIFrameError
from dpiframe_core.features.row_block import RowBlock

log = logging.getLogger(__name__)

Answered = Callable[["ScoringRequest", Answer], None]


@dataclass(slots=True, eq=False)
class ScoringRequest:
    """One that is open; its scorer's `Reply`. `answered` is called once, unless the client hangs up.

    Attributes:
        served: who scores it, in use from when it is `sent`, which is what the scorer knows it by.
        asked: how its answer is to look. encode: what has encoded it, and does for a shadow.
    """

    routes: "ScoringRoutes"
    key: int
    close: bool
    protocol: bool
    job: Job
    served: ServedModel | None = None
    asked: InferRequest | Options | None = None
    encode: Callable[[ServedModel], RowBlock] | None = None
    sent: Any = None
    ended: bool = False

    def done(self) -> bool:
        return self.ended

    def set_result(self, scored: Scored, /) -> None:
        try:
            answer = self.routes.scores(self, scored)
        except Exception as error:
            self._end(self.routes.refusal(self, error))
            return
        self._end(answer)
        self.routes.shadow(self, scored)  # what writes the answer is due by now, and so comes first

    def set_exception(self, error: Exception, /) -> None:
        self._end(self.routes.refusal(self, error))

    def hang_up(self) -> None:
        self._end(None)

    def _end(self, answer: Answer | None) -> None:
        self.ended = True
        self.routes.end(self, answer)


class ScoringRoutes:
    """Both routes, as the direct port takes them."""

    def __init__(self, score: ScoreRoute, infer: InferRoute, answered: Answered) -> None:
        self._score, self._infer, self._answered = score, infer, answered
        self._scoring = infer.inference.scoring

    def takes(self, head: RequestHead, received: Received) -> bool:
        """Whether it is one to score, and so small that it needs no thread."""
        if head.infer is None and not head.score:
            return False
        return received.fault is not None or (not head.packed and encodes_on_loop(0, len(received.body)))

    def begin(self, head: RequestHead, headers: list[Header], received: Received) -> "ScoringRequest | None":
        """Sends it to its scorer, which is to be flushed, or has it answered at once; None: it needs a thread after all."""
        request_id = answers.request_id_of(headers) if received.apart else answers.fresh_request_id()
        job = self._scoring.begin(request_id, headers)
        self._scoring.over(job, "receive")
        request = ScoringRequest(self, received.key, received.close, head.infer is not None, job)
        if received.fault == GONE:
            request.hang_up()
            return request
        try:
            if head.infer is None:
                sent = self._score_sent(request, headers, received)
            else:
                sent = self._infer_sent(request, head, headers, received)
        except Exception as error:
            request.set_exception(error)
            return request
        return request if sent else None

    def scores(self, request: ScoringRequest, scored: Scored) -> Answer:
        """Raises InputError for one that is not finite."""
        served, job, asked = request.served, request.job, request.asked
        assert served is not None
        self._scoring.scored(job, served, scored)
        if isinstance(asked, InferRequest):
            return rest.scores_answer(served, asked, job, np.ascontiguousarray(scored.scores, "<f4"))
        top_k = asked.top_k if asked is not None else None
        return answers.score_answer(served.info, job, scored.scores, job.timing_ms(self._scoring.total_ms(job)), top_k)

    def refusal(self, request: ScoringRequest, error: Exception) -> Answer:
        return refusal_of(error, request.job.request_id, request.protocol)

    def shadow(self, request: ScoringRequest, scored: Scored) -> None:
        if request.served is not None and request.encode is not None:
            self._scoring.shadow(request.served, request.encode, scored)

    def end(self, request: ScoringRequest, answer: Answer | None) -> None:
        if request.served is not None and request.sent is not None:
            sent, request.sent = request.sent, None  # it knows the request: a cycle would hold its bytes for long
            self._scoring.left(request.served, sent)
        self._scoring.finish(request.job, "cancelled" if answer is None else answer.outcome)
        if answer is not None:
            self._answered(request, answer)

    def _infer_sent(self, request: ScoringRequest, head: RequestHead, headers: list[Header], received: Received) -> bool:
        assert head.infer is not None
        job, inference = request.job, self._infer.inference
        self._infer.begun(job, head.infer, headers, head.media)
        if received.fault is not None:
            raise self._unread(headers, received.fault)
        asked = request.asked = parse(received.body, head.envelope_bytes)
        if not encodes_on_loop(asked.values, 0):
            return False
        request.encode = inference.encoding(job, asked)
        self._send(request, inference.chosen(job, *head.infer, asked), asked.deadline_ms, asked.parameters.priority)
        return True

    def _score_sent(self, request: ScoringRequest, headers: list[Header], received: Received) -> bool:
        kind = self._score.begun(headers)
        if received.fault is not None:
            raise self._unread(headers, received.fault)
        if kind == JSON and is_list(received.body):
            return False
        job = request.job
        served, asked = self._score.parsed(job, kind, received.body)
        if not encodes_on_loop(values_of(asked), 0):
            return False
        options = request.asked = asked.options
        job.model, job.version = served.info.name, served.info.version
        job.given = asked.candidates, asked.context
        request.encode = lambda one: asked.encoded(one.encode)
        self._send(request, served, options.deadline_ms, options.priority)
        return True

    def _send(self, request: ScoringRequest, served: ServedModel, deadline_ms: float | None, priority: int) -> None:
        assert request.encode is not None
        request.served = served
        request.sent = self._scoring.send(request.job, served, request.encode, deadline_ms, priority, request)

    def _unread(self, headers: list[Header], fault: str) -> DPIFrameError:
        limits = self._scoring.limits
        checked_encoding(headers, limits.max_body_bytes)
        return body_fault(fault, limits)


def scorer_of(request: ScoringRequest) -> Scorer | None:
    """The one to flush."""
    return None if request.ended or request.served is None else request.served.scorer


def refusal_of(error: Exception, request_id: str, protocol: bool) -> Answer:
    """What a client is told of it, in the form of the Open Inference Protocol or in ours."""
    if isinstance(error, DPIFrameError):
        return (rest.error_answer if protocol else answers.error_answer)(error, request_id)
    log.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
    return (rest.internal_error if protocol else answers.internal_error)(request_id)
