"""Notices a device that failed, and a run that does not end. Knows no Ray and no device.

Time is counted in this thread's own turns: while the process is stopped, or its host, it counts none, and raises no alarm.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from dpiframe_core.errors import Unavailable

_TURNS = 20  # of which a run may see so many, or as many more as make them no longer than:
_LOOK_S = 0.5
_HANGS = "device: got a run that has lasted {:g} s, expected its end (batching.max_run_s)"


class Runs(Protocol):
    """`Dispatcher`: the number of the run that has been under way for longest, None without any. No number comes twice."""

    @property
    def oldest_run(self) -> int | None: ...

    @property
    def over(self) -> bool:
        """It has been stopped, and nothing runs any more."""


def watch(
    runs: Runs,
    check: Callable[[], None],
    max_run_s: float,
    lost: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Calls `lost` with the reason when `check` raises, or a run has lasted longer than `max_run_s`; a twentieth of it, or
    half a second, later at most. Returns then, or once the runs are over.
    """
    every = min(max_run_s / _TURNS, _LOOK_S)
    seen, turns = None, 0
    while not runs.over:
        sleep(every)
        run = runs.oldest_run
        turns = turns + 1 if run is not None and run == seen else 0
        seen = run
        try:
            check()
            if turns > round(max_run_s / every):
                raise Unavailable(_HANGS.format(max_run_s))
        except Unavailable as error:
            lost(str(error))
            return


def start_watching(runs: Runs, check: Callable[[], None], max_run_s: float, lost: Callable[[str], None]) -> None:
    """Has a thread of its own `watch`."""
    threading.Thread(target=watch, args=(runs, check, max_run_s, lost), name="watchdog", daemon=True).start()
