"""One request of any protocol, from its encoding to its scores: the order of the steps, their clock, and what is counted.

Knows no HTTP and no gRPC; the routes turn requests into an `encode` and scores into answers.
"""

import asyncio
import time
from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np

from deployments.batching.refusals import check_deadline
from deployments.batching.scorer import Reply, Scored
from deployments.config import Limits
from deployments.metrics import RequestSeen
from deployments.scoring.job import Job
from deployments.scoring.request_trace import Headers
from deployments.scoring.served_model import ServedModel
from deployments.scoring.shadow import Shadows
from deployments.scoring.watchers import Watchers
from dpiframe_core.errors import InputError
from dpiframe_core.features.row_block import Floats, RowBlock

# Values above which a request is encoded on a thread. Below, a thread gains nothing: the interpreter lets it hold the loop
# for 5 ms at a time anyway, and so many values take about that long.
_ENCODE_ON_LOOP_VALUES = 50_000
_NOBODY = Watchers()
_ENCODE_ON_LOOP_BYTES = 512 * 1024  # and for the lists of multi-valued features, which may be of any length, that of the body


class Scoring:
    """Scores requests for every route of a process. `clock` is also the scorers'. `on_request` is told of each that is over."""

    def __init__(
        self,
        limits: Limits,
        on_request: Callable[[RequestSeen], None],
        watchers: Watchers = _NOBODY,
        clock: Callable[[], float] = time.monotonic,
        shadows: Shadows | None = None,
    ) -> None:
        self.limits = limits
        self._on_request = on_request
        self._tracer, self._recorder = watchers.tracer, watchers.recorder
        self._clock = clock
        self._shadows = shadows

    @property
    def watched(self) -> bool:
        """Whether somebody sees single requests."""
        return self._tracer is not None or self._recorder is not None

    def begin(self, request_id: str, headers: Headers) -> Job:
        """`headers`, or a call's metadata, with names in lower case."""
        job = Job(request_id, self._clock())
        if self._tracer is not None:
            job.trace = self._tracer.begin(headers, job.started)
        return job

    def over(self, job: Job, step: str) -> None:
        """Notes that a step of a traced request is over."""
        if job.trace is not None:
            job.trace.mark(step, self._clock())

    def total_ms(self, job: Job) -> float:
        return (self._clock() - job.started) * 1e3

    def seen(self, request: RequestSeen) -> None:
        """Counts a request that went another way than `finish`."""
        self._on_request(request)

    def finish(self, job: Job, outcome: str) -> None:
        """Counts a request. `outcome`: "ok", "cancelled" or the code of an error."""
        times = (job.queue_ms, job.encode_ms, job.device_ms, self.total_ms(job))
        counts = (job.rows, job.values, job.oov_count)
        self._on_request(RequestSeen(job.model, job.version, outcome, *counts, *times, job.sampled))
        if job.trace is not None and self._tracer is not None:
            now = self._clock()
            if outcome == "ok":
                job.trace.mark("answer", now)
            self._tracer.end(job, outcome, now)

    async def score(
        self,
        job: Job,
        served: ServedModel,
        encode: Callable[[ServedModel], RowBlock],
        *,
        deadline_ms: float | None,
        priority: int,
        values: int = 0,
        body_bytes: int = 0,
    ) -> Scored:
        """Encodes and scores. `values` and `body_bytes`, about how much there is to encode, decide where that happens.

        Call it in the turn of the event loop in which `served` was found: from here on that is in use.

        Raises:
            DPIFrameError: whatever `encode` or the scorer raise on purpose; InputError for a score that is not finite.
        """
        deadline, before = self._deadline(job, deadline_ms)
        on_loop = encodes_on_loop(values, body_bytes)
        with served.in_use:
            block = encode(served) if on_loop else await asyncio.to_thread(encode, served)
            self._encoded(job, block, before)
            scored = await served.scorer.submit(block, deadline, priority)
        self.scored(job, served, scored)
        self.shadow(served, encode, scored, on_loop)
        return scored

    def send(
        self,
        job: Job,
        served: ServedModel,
        encode: Callable[[ServedModel], RowBlock],
        deadline_ms: float | None,
        priority: int,
        reply: Reply,
    ) -> Any:
        """`score` in parts, for what is encoded on the loop: what `Scorer.send` gives. `scored` takes what the reply is told.

        Call it in the turn in which `served` was found: that is in use until the request is `left`.

        Raises:
            DPIFrameError: as `score`; there is nothing to leave then.
        """
        deadline, before = self._deadline(job, deadline_ms)
        block = encode(served)
        self._encoded(job, block, before)
        sent = served.scorer.send(block, deadline, priority, reply)
        served.in_use.enter()  # nothing else had a turn since
        return sent

    def left(self, served: ServedModel, sent: Any) -> None:
        """A request that was sent is answered or given up: what `send` gave is over, and its version no longer in use."""
        served.scorer.over(sent)
        if isinstance(sent, asyncio.Task):  # given up, it goes on until it is told so
            sent.add_done_callback(served.in_use.leave)
        else:
            served.in_use.leave()

    def shadow(
        self, served: ServedModel, encode: Callable[[ServedModel], RowBlock], scored: Scored, on_loop: bool = True
    ) -> None:
        """Has a shadow of the version score it too, once what is ready to be written is. `scored` has found nothing wrong."""
        if self._shadows is not None:
            self._shadows.after(served, encode, scored.scores, on_loop)

    def scored(self, job: Job, served: ServedModel, scored: Scored) -> None:
        """Notes a request's scores in its job. Raises InputError for one that is not finite."""
        job.queue_ms, job.device_ms, job.degraded_rows = scored.queue_ms, scored.device_ms, scored.degraded_rows
        if job.trace is not None:
            # What the engine told, which may be another process, laid end to end: runs of a split request overlap.
            now, bound = self._clock(), job.trace.over_at + scored.queue_ms / 1e3
            job.trace.mark("queue", min(bound, now))
            job.trace.mark("device", min(bound + scored.device_ms / 1e3, now))
        _check_finite(scored.scores)
        job.sampled = served.sample.of(scored.scores, job.started)
        if self._recorder is not None:
            self._recorder.take(job, served, scored.scores)

    def _deadline(self, job: Job, deadline_ms: float | None) -> tuple[float | None, float]:
        """The moment, and now."""
        if deadline_ms is None:
            deadline_ms = self.limits.default_deadline_ms
        deadline = None if deadline_ms is None else job.started + deadline_ms / 1e3
        before = self._clock()
        if job.trace is not None:
            job.trace.mark("validate", before)
        check_deadline(deadline, before, "before it was encoded")
        return deadline, before

    def _encoded(self, job: Job, block: RowBlock, before: float) -> None:
        job.rows, job.values, job.oov_count = block.rows, block.id_places, block.oov_count
        encoded = self._clock()
        job.encode_ms = (encoded - before) * 1e3
        if job.trace is not None:
            job.trace.mark("encode", encoded)


def encodes_on_loop(values: int, body_bytes: int) -> bool:
    """Whether so much is encoded where it was read, not on a thread."""
    return values < _ENCODE_ON_LOOP_VALUES and body_bytes < _ENCODE_ON_LOOP_BYTES


def _check_finite(scores: Floats) -> None:
    """Raises InputError if a score is not finite: golden rows prove the weights sound, so the request's numbers overflow."""
    if isfinite(np.add.reduce(scores, axis=None)):  # which no sum with an infinite number or none in it is
        return
    finite = np.isfinite(scores)
    if not finite.all():
        row, task = np.unravel_index(int(np.argmin(finite)), finite.shape)
        raise InputError(f"candidates[{row}]", float(scores[row, task]), "feature values for which the score is finite")
