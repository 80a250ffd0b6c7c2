"""What a replica says of its own load, for `autoscaling`. Knows no Ray: the replica calls `read` when Serve asks."""

import time
from collections.abc import Callable, Sequence

from deployments.metrics import Gauged
from deployments.serve.autoscaling import ReplicaLoad


class LoadMeter:
    """Shares of the time since the last reading. Call `read` on the event loop: its thread's CPU time is what is counted.

    Models of one replica share its device, so their shares are added up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._at = clock()
        self._cpu_s = cpu_clock()
        self._device_s = 0.0

    def read(self, models: Sequence[Gauged]) -> ReplicaLoad:
        now, cpu_s = self._clock(), self._cpu_clock()
        device_s = sum(model.busy_s for model in models)
        passed = max(now - self._at, 1e-6)
        load = ReplicaLoad(
            queued_rows=sum(model.queued_rows for model in models),
            device_share=min(max(0.0, device_s - self._device_s) / passed, 1.0),
            loop_share=min(max(0.0, cpu_s - self._cpu_s) / passed, 1.0),
        )
        self._at, self._cpu_s, self._device_s = now, cpu_s, device_s
        return load
