"""What SIGTERM and SIGINT do to a command of ours: both end it as Ctrl-C does, and neither interrupts its end.

SIGINT alone does not: a script's `&` and `nohup` in one start programs with SIGINT ignored, and so they stay.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


def interrupt_on_sigterm() -> None:
    """SIGTERM raises KeyboardInterrupt from now on. To be called again after ray.init, which sets a handler of its own."""
    signal.signal(signal.SIGTERM, _interrupt)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt within the block."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half a stop behind; stopping has its own bound in time."""
    before = [(s, signal.signal(s, signal.SIG_IGN)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for signum, handler in before:
            signal.signal(signum, handler)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
