"""A thread that follows the other processes of a host which hold shares of a model's tables."""

import logging
import threading
from collections.abc import Callable

import torch

from dpiframe_core.embedding.store import EmbeddingStore
from kernels.runtime.launch import own_stream

log = logging.getLogger(__name__)
EVERY_S = 0.5


class Follower:
    """Looks twice a second, until it is closed.

    Args:
        place: see `EmbeddingStore.refresh`.
    """

    def __init__(self, store: EmbeddingStore, place: Callable[[], None]) -> None:
        self._store, self._place = store, place
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dpiframe-shards", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        device = self._store.device
        with torch.cuda.device(device), torch.cuda.stream(own_stream(device)):
            while not self._ended.wait(EVERY_S):
                try:
                    if self._store.refresh(self._place):
                        log.warning("shares of tables on other GPUs have come or gone")
                except Exception as failure:  # whatever it is, batches go on as before
                    log.warning("shares of tables on other GPUs are not followed any more: %s", failure)
                    return

    def close(self) -> None:
        """Returns when nothing is looked for any more."""
        self._ended.set()
        self._thread.join()
