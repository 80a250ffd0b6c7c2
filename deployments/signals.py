"""What SIGTERM and SIGINT do to a command of ours: both end it as Ctrl-C does, and neither interrupts its end.

A service ends with status 0 on SIGTERM, the way to ask for its end, and with 130 on Ctrl-C, in whatever phase it is.

SIGINT alone does not: a script's `&` and `nohup` in one start programs with SIGINT ignored, and so they stay.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


def interrupt_on_sigterm() -> None:
    """SIGTERM raises KeyboardInterrupt from now on; none has come yet."""
    _came.clear()
    signal.signal(signal.SIGTERM, _interrupt)


@contextlib.contextmanager
def ray_init() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in the block and after it, though `ray.init` has handlers that end the process."""
    try:
        yield
    except SystemExit:
        _came.append(signal.SIGTERM)
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, _interrupt)


def stay_uninterrupted() -> None:
    """What is left is the end of the process."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


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


def terminated() -> bool:
    """Whether SIGTERM has come since. An interrupt cannot tell: Ray raises its own in the place of ours."""
    return bool(_came)


_came: list[int] = []


def _interrupt(signum: int, frame: FrameType | None) -> None:
    _came.append(signum)
    raise KeyboardInterrupt
