"""What changes where a running engine's rows lie: other processes of the host that come and go, and rows that are read more or
less than before. Batches go on meanwhile.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dpiframe_core.embedding.follower import Follower
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.replan.replanner import Replanner, TableReads

log = logging.getLogger(__name__)


class MovingTables:
    """Owns the thread that follows an engine's tables, from `start` to `close`; of tables that stay there is none.

    Args:
        home: where the rows lie; None: all in the device's memory, for good.
        place: has all lookups find their rows anew. over: returns when all batches are done that have begun. check: raises if
            the engine is closed.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        store: EmbeddingStore,
        home: Home | None,
        place: Callable[[], None],
        over: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        # Whose methods `place` and `over` are owns this: kept in vain, they would keep each other until a collection.
        self._steps: list[Callable[[], object]] = [partial(_refresh, store, place, over)] if store.shared else []
        self._replanner: Replanner | None = None
        moves = store.ahead is not None or (store.tiers is not None and store.tiers.moves)
        if home is not None and home.replan_s is not None and moves:
            self._replanner = Replanner(schema, store.tiers, store.ahead, home, over, check)
            self._steps.append(self._replanner.step)
        self._follower: Follower | None = None

    @property
    def reads(self) -> TableReads | None:
        """Where sampled reads were served, and how many rows moved; None unless rows may move."""
        return None if self._replanner is None else self._replanner.reads

    def offer(self, blocks: Sequence[RowBlock]) -> None:
        """What was scored, to be counted: some of it is."""
        if self._replanner is not None:
            self._replanner.sample.offer(blocks)

    def start(self, device: torch.device) -> None:
        """Follows, if there is what to follow."""
        if self._steps:
            self._follower = Follower(device, self._steps)

    def close(self) -> None:
        """Returns when nothing changes any more."""
        if self._follower is not None:
            self._follower.close()


def _refresh(store: EmbeddingStore, place: Callable[[], None], over: Callable[[], None]) -> None:
    if store.refresh(place, over):
        log.warning("shares of tables on other GPUs have come or gone")
