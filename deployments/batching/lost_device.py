"""Ends this process when its device fails or hangs: neither gets well again, nor can a hung run be interrupted.

A process that ends is seen at once by HAProxy, by ingresses and by Serve, which starts another one. One that only says that it
is ill would be given requests for seconds more, and most of all: where all are refused at once, the least are open.
"""

import logging
from collections.abc import Callable

from deployments.batching.watchdog import Runs, start_watching
from deployments.processes import end_soon

log = logging.getLogger(__name__)
# Meanwhile it refuses at once, and so is sent most. The tries of our client last 0.14 s at least: it must not spend all of
# them here.
_LAST_WORDS_S = 0.1


def end_when_lost(runs: Runs, check: Callable[[], None], max_run_s: float, fail: Callable[[str], None]) -> None:
    """Watches until the runs are over. `check` raises Unavailable if the device has failed; `fail` is to answer who waits."""

    def lost(why: str) -> None:
        log.critical("%s: this process ends, and Serve starts another one", why)
        fail(why)
        end_soon(_LAST_WORDS_S)

    start_watching(runs, check, max_run_s, lost)
