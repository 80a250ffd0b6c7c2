"""What `ray.init` leaves out here, for which it has no setting: processes that nobody asks anything in a private cluster, and
handlers of SIGTERM.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from deployments.signals import interrupts_deferred

# A dashboard, of which usage reports are left, which are off; an autoscaler of nodes; and what carries logs to the driver,
# which prints none. 2.1 s of CPU at a start, which waits for the first.
_IDLE = ("start_api_server", "start_monitor", "start_log_monitor")


def idle_processes_left_out() -> contextlib.AbstractContextManager[None]:
    """`ray.init` starts none of them within the block."""
    from ray._private.node import Node

    return _left_out(Node, *_IDLE)


@contextlib.contextmanager
def undisturbed_init() -> Iterator[None]:
    """`ray.init` meets no interrupt within the block, and leaves SIGTERM's handler as it is: its own would end the process with
    other statuses.

    Its C++ part takes a SIGTERM for a crash until the block ends: it says so, calls the handler, and has an alarm abort the
    process three seconds later, which a deferred interrupt turns off.
    """
    from ray._private import utils

    with interrupts_deferred(), _left_out(utils, "set_sigterm_handler"):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # in the place of that of C++


@contextlib.contextmanager
def _left_out(owner: object, *names: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, _nothing)
        yield


def _nothing(*of: object, **options: Any) -> None:
    pass
