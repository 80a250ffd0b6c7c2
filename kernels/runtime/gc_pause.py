"""The garbage collector at rest for a while."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
