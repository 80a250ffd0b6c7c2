"""Has a second version score what the first has answered, and tells how far the two are apart. It never delays an answer.

Each request is scored in the shadow after its answer, if nothing waits for the device then; a failure there is a count.
"""

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from deployments.metrics import ShadowSeen
from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import DPIFrameError
from dpiframe_core.features.row_block import Floats, RowBlock

log = logging.getLogger(__name__)

_AT_ONCE = 4  # requests in the shadow of one process; further ones are dropped
_WITHIN_S = 1.0
_KEPT = 64  # differences of a request that are reported


class Shadows:
    """Of one process, on its event loop. `shadow_of`: see `Catalog`; `seen` is told what became of each request."""

    def __init__(
        self,
        shadow_of: Callable[[ServedModel], ServedModel | None],
        seen: Callable[[ShadowSeen], None],
        clock: Callable[[], float],
    ) -> None:
        self._shadow_of, self._seen, self._clock = shadow_of, seen, clock
        self._tasks: set[asyncio.Task[None]] = set()

    def after(self, served: ServedModel, encode: Callable[[ServedModel], RowBlock], scores: Floats, on_loop: bool) -> None:
        """Follows a request that has been scored. `on_loop`: it is small enough to be encoded on the event loop."""
        shadow = self._shadow_of(served)
        if shadow is None:
            return
        if len(self._tasks) >= _AT_ONCE or served.scorer.queued_rows or shadow.scorer.queued_rows:
            self._tell(served, shadow, "dropped")
            return
        # It begins when the event loop has written the answer, as that takes no turn of its own.
        task = asyncio.create_task(self._score(served, shadow, encode, scores, on_loop), name="shadow")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score(
        self, served: ServedModel, shadow: ServedModel, encode: Callable[[ServedModel], RowBlock], scores: Floats, on_loop: bool
    ) -> None:
        with shadow.in_use:
            try:
                block = encode(shadow) if on_loop else await asyncio.to_thread(encode, shadow)
                others = (await shadow.scorer.submit(block, self._clock() + _WITHIN_S)).scores
            except DPIFrameError as error:
                self._tell(served, shadow, error.code)
                return
            except Exception:
                log.exception("version %s of %s failed in the shadow", shadow.info.version, shadow.info.name)
                self._tell(served, shadow, "internal")
                return
        if others.shape != scores.shape:
            self._tell(served, shadow, "other_tasks")
            return
        step = -(-len(scores) // _KEPT)
        self._tell(served, shadow, "ok", np.abs(others[::step] - scores[::step]).max(axis=1).tolist())

    def _tell(self, served: ServedModel, shadow: ServedModel, outcome: str, differences: tuple[float, ...] = ()) -> None:
        info = served.info
        self._seen(ShadowSeen(info.name, info.version, shadow.info.version, outcome, differences))
