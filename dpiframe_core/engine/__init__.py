"""One model of one bundle on one device: the engine, its lanes and programs, and what a warm-up measures and keeps.

Knows no HTTP and no Ray. `Engine` is made known here when it is asked for, so that buckets and options stay free of torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpiframe_core.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from dpiframe_core.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
