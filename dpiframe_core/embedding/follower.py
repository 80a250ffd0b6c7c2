"""A thread that keeps a model's tables in order while batches run: it follows the processes of the host that hold shares of
them, and has rows move that are read more or less than before.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

import torch

from kernels.runtime.launch import own_stream

log = logging.getLogger(__name__)
EVERY_S = 0.5


class Follower:
    """Takes each step twice a second, until it is closed; one that fails is not taken again.

    Args:
        device: of the tables.
    """

    def __init__(self, device: torch.device, steps: Sequence[Callable[[], object]]) -> None:
        self._device, self._steps = device, list(steps)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dpiframe-tables", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with contextlib.ExitStack() as entered:
            if self._device.type == "cuda":
                entered.enter_context(torch.cuda.device(self._device))
                entered.enter_context(torch.cuda.stream(own_stream(self._device)))
            while self._steps and not self._ended.wait(EVERY_S):
                for step in list(self._steps):
                    try:
                        step()
                    except Exception as failure:  # whatever it is, batches go on as before
                        if not self._ended.is_set():
                            log.warning("where rows of tables lie is not followed any more: %s", failure)
                        self._steps.remove(step)

    def close(self) -> None:
        """Returns when no step is taken any more."""
        self._ended.set()
        self._thread.join()
