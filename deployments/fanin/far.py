"""Requests to engines of other nodes, for an ingress that has none on its own: whole blocks, by calls that copy. Ray is behind
the handle of the engines' deployment: nothing of it is imported.

That way takes milliseconds where shared memory takes microseconds. It is for the time until there is an engine here again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from deployments.batching.refusals import expired
from deployments.batching.scorer import Scored, Scorer
from deployments.fanin.handshake import Welcome
from dpiframe_core.errors import DeadlineExceeded, DPIFrameError, Overloaded, Unavailable
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import RowBlock

_GREETS_WITHIN_S = 1.0
_ANSWERS_WITHIN_S = 10.0  # without a replica, Serve's router would hold a request until there is one


@dataclass(frozen=True, slots=True)
class FarAsk:
    """A request. `left_s`: until its deadline, since clocks of hosts differ; None without one."""

    model: str
    fingerprint: str
    block: bytes
    left_s: float | None
    priority: int


@dataclass(frozen=True, slots=True)
class FarAnswer:
    """Scores, float32[rows, tasks], or else the error's code, its message and when to try again."""

    code: str = ""
    message: str = ""
    retry_after_s: float = 0.0
    scores: bytes = b""
    queue_ms: float = 0.0
    device_ms: float = 0.0


class FarEngines(Protocol):
    """Engines of one model and bundle on other nodes."""

    async def greet(self) -> Welcome:
        """Of one of them. Raises Unavailable: none answers."""

    async def ask(self, ask: FarAsk) -> FarAnswer:
        """Raises Unavailable: whoever had it is gone."""


class HandleEngines:
    """`FarEngines` of one model. Serve's router picks the replica, of two at random the one with fewer requests."""

    def __init__(self, handle: Any, model: str, fingerprint: str) -> None:
        self._handle, self._model, self._fingerprint = handle, model, fingerprint

    async def greet(self) -> Welcome:
        welcome = await _called(self._handle.greet.remote(self._model, self._fingerprint), _GREETS_WITHIN_S)
        if not isinstance(welcome, Welcome) or welcome.refused:
            raise Unavailable(f"engine of another node: {getattr(welcome, 'refused', welcome)}")
        return welcome

    async def ask(self, ask: FarAsk) -> FarAnswer:
        answer = await _called(self._handle.answer.remote(ask), _ANSWERS_WITHIN_S)
        if not isinstance(answer, FarAnswer):
            raise Unavailable(f"engine of another node: got {type(answer).__name__}, expected scores")
        return answer


async def answer(ask: FarAsk, scorer: Scorer, layout: BlockLayout, clock: Callable[[], float]) -> FarAnswer:
    """The engine's end."""
    try:
        block = RowBlock.from_bytes(ask.block, layout)
        scored = await scorer.submit(block, None if ask.left_s is None else clock() + ask.left_s, ask.priority)
    except Overloaded as error:
        return FarAnswer(error.code, str(error).partition("; retry after")[0], error.retry_after_s)
    except DPIFrameError as error:
        return FarAnswer(error.code, str(error))
    return FarAnswer(scores=scored.scores.tobytes(), queue_ms=scored.queue_ms, device_ms=scored.device_ms)


async def scored(ask: Callable[[FarAsk], Awaitable[FarAnswer]], request: FarAsk, rows: int) -> Scored:
    """The ingress's end.

    Raises:
        DeadlineExceeded, Overloaded, Unavailable: as the engine there has it; Unavailable for all else.
    """
    try:
        async with asyncio.timeout(request.left_s):
            got = await ask(request)
    except TimeoutError:
        raise expired("in the queue or on the device of another node") from None
    if got.code:
        raise _error(got)
    return Scored(np.frombuffer(got.scores, np.float32).reshape(rows, -1), got.queue_ms, got.device_ms)


def _error(got: FarAnswer) -> DPIFrameError:
    if got.code == Overloaded.code:
        return Overloaded(got.message, got.retry_after_s)
    return (DeadlineExceeded if got.code == DeadlineExceeded.code else Unavailable)(got.message)


async def _called(response: Any, within_s: float) -> Any:
    try:
        return await asyncio.wait_for(response, within_s)
    except Exception as error:  # whatever Ray calls it, that replica is gone, or there is none
        raise Unavailable(f"engine of another node: got {type(error).__name__}, expected an answer") from error
