"""Notices a device that failed, and a run that does not end. Knows no Ray and no device.

Time is counted in this thread's own turns: while the process is stopped, or its host, it counts none, and raises no alarm.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from dpiframe_core.errors import Unavailable

_TURNS = 20  # of which a run may see so many
_HANGS = "device: got a run that has lasted {:g} s, expected its end (batching.max_run_s)"


class Watched(Protocol):
    """`Dispatcher`: the number of the run that has been under way for longest, None without any. No number comes twice."""

    @property
    def oldest_run(self) -> int | None: ...


class Watchdog:
    """Calls `lost` once, from a thread of its own, when `check` raises, or a run has lasted longer than `max_run_s`.

    Either at most a twentieth of `max_run_s` later. `lost` gets the reason. Nothing is watched after it.
    """

    def __init__(self, watched: Watched, check: Callable[[], None], max_run_s: float, lost: Callable[[str], None]) -> None:
        self._watched, self._check, self._max_run_s, self._lost = watched, check, max_run_s, lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        seen, turns = None, 0
        while not self._stop.wait(self._max_run_s / _TURNS):
            run = self._watched.oldest_run
            turns = turns + 1 if run is not None and run == seen else 0
            seen = run
            try:
                self._check()
                if turns > _TURNS:
                    raise Unavailable(_HANGS.format(self._max_run_s))
            except Unavailable as error:
                self._lost(str(error))
                return
