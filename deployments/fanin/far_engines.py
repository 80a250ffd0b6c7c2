"""Engines of other nodes, through Serve's handle of their deployment. Ray is behind the handle: nothing of it is imported."""

import asyncio
from typing import Any

from deployments.fanin.far import FarAnswer, FarAsk
from deployments.fanin.handshake import Welcome
from dpiframe_core.errors import Unavailable

_GREETS_WITHIN_S = 1.0
_ANSWERS_WITHIN_S = 10.0  # without a replica, Serve's router would hold a request until there is one


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


async def _called(response: Any, within_s: float) -> Any:
    try:
        return await asyncio.wait_for(_awaited(response), within_s)
    except Exception as error:  # whatever Ray calls it, that replica is gone, or there is none
        raise Unavailable(f"engine of another node: got {type(error).__name__}, expected an answer") from error


async def _awaited(response: Any) -> Any:
    return await response
