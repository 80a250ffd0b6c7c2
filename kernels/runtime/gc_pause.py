"""The garbage collector at rest, for a while or as far as a service goes; and the interpreter not kept from who serves."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_S = 0.5e-3  # Python's own is 5 ms
_YOUNG = 20_000  # new objects, less those gone, that set off a collection; Python's own 700 is some ten a second


def gc_settled() -> None:
    """For a service that is ready: what is there now stays, and is not gone through any more.

    An ingress with Ray and FastAPI in it has 154,000 objects: to go through them took 0.37 s on a busy host, with every request
    of the process waiting. And a thread that computes, such as that of metrics, hands the interpreter over ten times as soon:
    an event loop or a lane that has slept would wait 5 ms for it, once for each time that it slept.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)
    sys.setswitchinterval(_SWITCH_S)


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage is collected meanwhile, in whatever thread; where several do so at once, until the first of them ends.

    For lists of a large body, which have no cycles and are gone through again and again; and while a CUDA graph is captured, as
    the graphs of a lane that is garbage may not be destroyed by a thread that captures.
    """
    enabled = gc.isenabled()
    if enabled:  # else somebody else has it off, and will turn it on
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
