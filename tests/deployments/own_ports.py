"""Ports that this process of pytest has to itself until it ends: a test may draw one long before something listens there.

They lie in windows as services hold them, so that neither a service nor another worker of pytest takes one meanwhile.
"""

import contextlib
import itertools
import socket
from collections.abc import Iterator
from functools import cache

from deployments.serve.host import WINDOW, port_windows

_HELD = contextlib.ExitStack()  # until the process ends


@cache
def _turns() -> Iterator[int]:
    """Each again only after all others."""
    windows = _HELD.enter_context(port_windows(2))
    return itertools.cycle([port for first in windows for port in range(first, first + WINDOW - 1)])


def own_port() -> int:
    """One that nobody listens on."""
    for port in _turns():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError
