"""What a private cluster leaves out of Ray: processes that nobody asks anything there. `ray.init` has no setting for them."""

import contextlib
from collections.abc import Iterator
from typing import Any

# A dashboard, of which usage reports are left, which are off; an autoscaler of nodes; and what carries logs to the driver,
# which prints none. 2.1 s of CPU at a start, which waits for the first.
_IDLE = ("start_api_server", "start_monitor", "start_log_monitor")


@contextlib.contextmanager
def idle_processes_left_out() -> Iterator[None]:
    """`ray.init` starts none of them within the block."""
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in _IDLE}
    try:
        for name in _IDLE:
            setattr(Node, name, _nothing)
        yield
    finally:
        for name, start in before.items():
            setattr(Node, name, start)


def _nothing(node: object, **options: Any) -> None:
    pass
