"""Scoring requests that C answers from end to end (`express.c`): which may be, by which engines, and what of them is Python's.

A request is one if all of it was seen before, to the byte, but for its id, its trace and the values of its tensors, and nobody
looks at single requests. What it may say was then checked by the routes; every refusal is made here, by the same functions.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from deployments.batching.refusals import expired
from deployments.batching.scorer import Scored
from deployments.direct.listener import EngineRing, Listener, Received, open_ring
from deployments.direct.request_head import RequestHead
from deployments.direct.scoring_request import ScoringRequest, refusal_of
from deployments.fanin.connection import Connection, engine_ended
from deployments.fanin.handshake import Agreement
from deployments.fanin.request_memory import RequestMemory
from deployments.fanin.rings import Status
from deployments.fanin.scorer import FanInScorer
from deployments.http_api.answers import Answer
from deployments.metrics import RequestSeen
from deployments.protocol import rest
from deployments.protocol.request import Form, InferRequest
from deployments.protocol.rest import InferRoute
from deployments.scoring.job import Job
from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import DPIFrameError
from dpiframe_core.features.row_block import RowBlock

log = logging.getLogger(__name__)

_SLOTS, _SLOT_BYTES = 1024, 1 << 18  # of one engine, each with room for a block and its scores; pages come as they are used
_FORMS, _HEAD_BYTES = 512, 4096  # so many are known, with heads of at most so many bytes
_LATE, _ENGINE_GONE, _FULL = 100, 101, 102  # as connection.h has them


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What C calls a form by. `values`: places for ids in its rows and contexts."""

    served: ServedModel
    rows: int
    values: int


class Ended(NamedTuple):
    """A request that C could not answer. `why`: a `Status`, OK if a score is not finite; or one of these three.

    `retry_s`: rows that wait, where there is no room for more.
    """

    key: int
    known: Known
    ring: EngineRing
    request_id: str
    why: int
    queue_ms: float
    encode_ms: float
    device_ms: float
    retry_s: float
    started: float
    scores: bytes | None


class Track:
    """A connection to an engine for C alone, beside the one that Python has: a `Beside`."""

    def __init__(
        self, agreed: Agreement, memory: RequestMemory, connection: Connection, left: Callable[["Track"], None]
    ) -> None:
        self.ring = open_ring(agreed, connection.rings, memory, _SLOT_BYTES)
        self.connection = connection
        self._agreed, self._memory, self._left = agreed, memory, left
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(agreed.sock, self._engine_gone)

    @property
    def open(self) -> int:
        return self.ring.open

    @property
    def unread_rows(self) -> int:
        return self._agreed.rings.unread_rows

    def close(self) -> None:
        self._loop.remove_reader(self._agreed.sock)
        self._left(self)
        self._agreed.close()
        self._memory.close()

    def _engine_gone(self) -> None:
        """The engine has ended this connection: with it the requests there, whatever becomes of Python's."""
        self.close()


class Express:
    """What C answers on one listener. `round_due` has the server look at it soon."""

    def __init__(self, listener: Listener, infer: InferRoute, round_due: Callable[[], None]) -> None:
        self._listener, self._infer, self._round_due = listener, infer, round_due
        self._scoring, self._catalog = infer.inference.scoring, infer.inference.catalog
        self._changes = self._changed()
        self._learned: set[tuple[bytes, Form]] = set()
        self._rings: dict[FanInScorer, list[EngineRing]] = {}
        self._tracks: dict[EngineRing, Track] = {}
        self._tried: WeakSet[Connection] = WeakSet()
        self._opening: set[asyncio.Task[None]] = set()

    def learn(self, head: RequestHead, received: Received, request: ScoringRequest) -> None:
        """Has C answer what is like a request that was sent to its scorer just now, if it may."""
        served, asked = request.served, request.asked
        if self._scoring.watched or served is None or not isinstance(asked, InferRequest):
            return
        form, scorer = asked.form, served.scorer
        if form is None or form.plan is None or asked.data is None or not isinstance(scorer, FanInScorer):
            return
        if (received.head, form) in self._learned or form.plan[0] is not served.encoded:
            return
        if len(received.head) > _HEAD_BYTES or not rest.wants_binary(asked) or not self._catalog.alone(served):
            return
        if not self._reaches(served, scorer):
            return
        layout, plan, tasks = served.encoded.schema.block_layout, form.plan[1], len(served.info.tasks)
        block = RowBlock.allocate(layout, plan.rows, plan.contexts)
        if block.places[-1] + 4 * plan.rows * tasks > _SLOT_BYTES:
            return
        if len(self._learned) >= _FORMS:
            self._forget()
        self._learned.add((received.head, form))
        deadline_ms = asked.deadline_ms if asked.deadline_ms is not None else self._scoring.limits.default_deadline_ms
        known = Known(served, plan.rows, block.id_places)
        before, after = rest.around_times(served, asked, Job("", 0.0), plan.rows, tasks)
        self._listener.learn(
            received.head,
            received.body[: len(received.body) - len(asked.data)],
            len(received.body),
            known,
            self._rings[scorer],
            (plan.rows, plan.contexts, tasks, asked.parameters.priority, (deadline_ms or 0.0) / 1e3),
            (block.buffer[: block.places[0]].tobytes(), layout.widths),
            *served.encoded.told(plan),
            (b"HTTP/1.1 200 OK\r\n", b"%s: %s\r\n" % rest.BINARY_TYPE, before.encode(), after.encode()),
        )

    def follow(self) -> None:
        """Before a round: nothing is known of versions that are no longer asked for, and of who may ask no longer."""
        if self._changes != (changes := self._changed()):
            self._changes = changes
            self._forget()

    def _changed(self) -> tuple[int, int]:
        gate = self._infer.gate
        return self._catalog.changes, 0 if gate is None else gate.changes()

    def tick(self) -> None:
        """Now and then: counts what was answered, and finds engines that have come."""
        self.count()
        for scorer in self._rings:
            self._connect(scorer)

    def count(self) -> None:
        tallies, samples = self._listener.seen()
        times, scores = defaultdict[Known, list[Any]](list), defaultdict[Known, list[Any]](list)
        for known, of_one, of_rows in samples:
            times[known].extend(np.frombuffer(of_one).reshape(-1, 4).tolist())
            scores[known].extend(np.frombuffer(of_rows, np.float32).reshape(-1, len(known.served.info.tasks)).tolist())
        for known, tally in tallies:
            info, sums = known.served.info, np.frombuffer(tally).reshape(-1, 5)
            for at in sums[:, 0].nonzero()[0].tolist():
                requests, queue_ms, encode_ms, device_ms, total_ms = sums[at].tolist()
                means = (queue_ms / requests, encode_ms / requests, device_ms / requests, total_ms / requests)
                of = (info.name, info.version, "cancelled" if at == len(sums) - 1 else "ok", known.rows, known.values, 0)
                sample = scores.pop(known, ()), int(requests), times.pop(known, ())
                self._scoring.seen(RequestSeen(*of, *means, *sample))

    def refused(self) -> list[tuple[int, Answer]]:
        """The answers to what C could not answer."""
        return [(ended.key, self._refusal(ended)) for ended in map(Ended._make, self._listener.ended())]

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for track in list(self._tracks.values()):
            track.close()
        self.count()

    def _refusal(self, ended: Ended) -> Answer:
        served = ended.known.served
        job = Job(ended.request_id, ended.started, served.info.name, served.info.version, ended.known.rows, ended.known.values)
        job.queue_ms, job.encode_ms, job.device_ms = ended.queue_ms, ended.encode_ms, ended.device_ms
        try:
            self._raise(ended, job)
            raise RuntimeError(f"express: got status {ended.why} and finite scores, expected a reason")
        except Exception as error:
            answer = refusal_of(error, job.request_id, protocol=True)
        self._scoring.finish(job, answer.outcome)
        return answer

    def _raise(self, ended: Ended, job: Job) -> None:
        served, track = ended.known.served, self._tracks.get(ended.ring)
        if ended.why == _LATE:
            raise expired("in the queue or on the device")
        if ended.why == _ENGINE_GONE or track is None:
            raise engine_ended()
        if ended.why == _FULL:
            raise track.connection.full(ended.known.rows, int(ended.retry_s))
        if ended.why != Status.OK:
            raise track.connection.refusal(ended.why, ended.known.rows, ended.retry_s)
        scores = np.frombuffer(ended.scores or b"", np.float32).reshape(ended.known.rows, -1)
        self._scoring.scored(job, served, Scored(scores, ended.queue_ms, ended.device_ms))

    def _forget(self) -> None:
        self._listener.forget()
        self._learned.clear()
        self._rings = {scorer: rings for scorer, rings in self._rings.items() if scorer.connections}

    def _reaches(self, served: ServedModel, scorer: FanInScorer) -> bool:
        """Whether C has a ring to each engine that the scorer has; if not, it will soon."""
        rings = self._rings.get(scorer)
        if rings is None:
            rings = self._rings[scorer] = []
            served.in_use.elsewhere.append(lambda: sum(ring.open for ring in rings))
        self._connect(scorer)
        return 0 < len(rings) == len(scorer.connections)

    def _connect(self, scorer: FanInScorer) -> None:
        for connection in scorer.connections:
            if connection not in self._tried:
                self._tried.add(connection)
                task = asyncio.create_task(self._open(scorer, connection), name="express")
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)

    async def _open(self, scorer: FanInScorer, connection: Connection) -> None:
        memory = RequestMemory(_SLOTS * _SLOT_BYTES)
        try:
            agreed = await scorer.search.greeted_again(connection, memory)
        except (OSError, DPIFrameError) as error:  # its requests go through Python
            log.warning("engine %d: %s", connection.index, error)
            memory.close()
            return
        track = Track(agreed, memory, connection, self._left)
        if not connection.alive or not self._listener.attach(track.ring):
            agreed.close()
            memory.close()
            return
        connection.besides.append(track)
        self._tracks[track.ring] = track
        self._rings[scorer].append(track.ring)

    def _left(self, track: Track) -> None:
        self._listener.detach(track.ring)
        track.connection.besides.remove(track)
        for rings in self._rings.values():
            if track.ring in rings:
                rings.remove(track.ring)
        del self._tracks[track.ring]
        self._tried.discard(track.connection)
        self._round_due()
