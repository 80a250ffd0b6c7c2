"""Memory that processes of one host share by its descriptor: it has no name, so nothing can be left behind by a kill."""

import os
import platform

from dpiframe_core.errors import ConfigError


def shared_memory(name: str, nbytes: int) -> int:
    """A file descriptor of `nbytes` zeros that lives as long as a descriptor or a mapping of it. `name` is for /proc alone."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def require_ordered_stores() -> None:
    """Raises ConfigError on processors on which the rings would need fences that Python does not have."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(
            f"topology: got 'fanin' on {platform.machine()}, expected x86-64 (see docs/serving.md), or 'colocated'"
        )
