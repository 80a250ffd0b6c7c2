"""Memory that processes of one host share by its descriptor: it has no name, so nothing can be left behind by a kill."""

import os
import platform

from dpiframe_core.errors import ConfigError


def shared_memory(name: str, nbytes: int) -> int:
    """A file descriptor of `nbytes` zeros that lives as long as a descriptor or a mapping of it. `name` is for /proc alone."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def ordered_stores() -> bool:
    """Whether all see this processor's stores in their order; else the rings would need fences that Python does not have."""
    return platform.machine() in ("x86_64", "AMD64")


def require_ordered_stores() -> None:
    """Raises ConfigError on processors without `ordered_stores`."""
    if not ordered_stores():
        raise ConfigError(
            f"topology: got 'fanin' on {platform.machine()}, expected x86-64 (see docs/serving.md), or 'colocated'"
        )
