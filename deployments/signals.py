"""What SIGTERM and SIGINT do to a command of ours: both end it as Ctrl-C does, and neither interrupts its end.

A service ends with status 0 on SIGTERM, the way to ask for its end, and with 130 on Ctrl-C, in whatever phase it is.

SIGINT alone does not: a script's `&` and `nohup` in one start programs with SIGINT ignored, and so they stay.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

_AGAIN_S, _PATIENCE_S = 0.05, 10.0
_INTERRUPTS = signal.SIGINT, signal.SIGTERM, signal.SIGALRM  # the last is of `_come_again`


def interrupt_on_sigterm() -> None:
    """SIGTERM raises KeyboardInterrupt from now on; none has come yet."""
    _came.clear()
    signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = _come_again


def stay_uninterrupted() -> None:
    """What is left is the end of the process."""
    for signum in _INTERRUPTS:
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt within the block."""
    hook, sys.unraisablehook = sys.unraisablehook, _come_again
    try:
        with _handled({signal.SIGTERM: _interrupt}):
            yield
    finally:
        sys.unraisablehook = hook


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """A second Ctrl-C must not leave half a stop behind; stopping has its own bound in time."""
    return _handled(dict.fromkeys(_INTERRUPTS, signal.SIG_IGN))


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """An interrupt of the block comes at its end, as long as that takes no more than ten seconds; a second one at once.

    Within an import an interrupt may be lost, or become another error; of `ray.init` it leaves a process that crashes.
    """
    own = {s: handler for s in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(s))}
    came: list[signal.Signals] = []

    def later(signum: int, frame: FrameType | None) -> None:
        if came:
            own[came[0]](came[0], frame)
        came.append(signal.Signals(signum))
        signal.signal(signal.SIGALRM, later)  # Ray's may stand here, see private_ray.undisturbed_init
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)

    try:
        with _handled(dict.fromkeys(own, later)):
            yield
    finally:
        if came:
            signal.alarm(0)
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _handled(by: Mapping[signal.Signals, Any]) -> Iterator[None]:
    before = {signum: signal.signal(signum, handler) for signum, handler in by.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def terminated() -> bool:
    """Whether SIGTERM has come since. An interrupt does not say which signal it is of."""
    return bool(_came)


_came: list[int] = []


def _interrupt(signum: int, frame: FrameType | None) -> None:
    _came.append(signum)
    raise KeyboardInterrupt


def _come_again(lost: "sys.UnraisableHookArgs") -> None:
    """Nobody sees what a weak reference's callback or a `__del__` raises: an interrupt that meets one would be lost."""
    if lost.exc_type is KeyboardInterrupt:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(lost)
