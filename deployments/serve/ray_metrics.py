"""The service's metrics through Ray Serve, hence on Ray's Prometheus port with Serve's tags. Here alone metrics know Ray.

A Ray metric call takes 2 to 6 us and a request needs seven of them, so requests leave a record in a queue, and a thread empties
it once a second. Counters are added up first; histograms, which take one value a call, get an even sample of a busy second.
"""

import collections
import logging
import threading
from collections.abc import Callable

from ray.serve import metrics

from deployments.metrics import FILL_BOUNDS, LATENCY_BOUNDS_MS, BatchSeen, Gauged, RequestSeen

log = logging.getLogger(__name__)

_KEPT = 200_000  # records; more than a second's worth of anything, and a bound if the thread is starved
_OBSERVED = 500  # values a histogram gets of one second: at 3,000 requests a second all of them took 6 % of a core


class RayMetrics:
    """Make it inside a replica. `close` reports what is left."""

    def __init__(self, interval_s: float = 1.0) -> None:
        model = ("model",)
        self._requests = metrics.Counter("dpiframe_requests", "Requests by outcome.", ("model", "outcome"))
        self._rows = metrics.Counter("dpiframe_rows", "Rows scored for requests.", model)
        self._oov = metrics.Counter("dpiframe_oov_values", "Values that met no vocabulary entry.", model)
        self._failed = metrics.Counter("dpiframe_failed_batches", "Runs that the device did not finish.", model)
        self._times = {
            step: metrics.Histogram(
                f"dpiframe_{step}_ms", f"Milliseconds of a request: {step}.", list(LATENCY_BOUNDS_MS), model
            )
            for step in ("queue", "encode", "device", "total")
        }
        self._fill = metrics.Histogram("dpiframe_batch_fill", "Rows of a run over max_batch_rows.", list(FILL_BOUNDS), model)
        self._computed = metrics.Counter("dpiframe_computed_rows", "Rows that runs computed, padding included.", model)
        self._padding = metrics.Counter("dpiframe_padding_rows", "Those of them that filled up a bucket for nobody.", model)
        self._busy = metrics.Counter("dpiframe_device_busy_ms", "Milliseconds of device time, over all lanes.", model)
        self._queued_rows = metrics.Gauge("dpiframe_queued_rows", "Rows that wait for a lane.", model)
        self._inflight_rows = metrics.Gauge("dpiframe_inflight_rows", "Rows on a lane.", model)
        self._seen: collections.deque[RequestSeen] = collections.deque(maxlen=_KEPT)
        self._batches: collections.deque[tuple[str, BatchSeen]] = collections.deque(maxlen=_KEPT)
        self._gauged: dict[str, Gauged] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(interval_s,), name="metrics", daemon=True)
        self._thread.start()

    def request(self, seen: RequestSeen) -> None:
        """Any thread may call it."""
        self._seen.append(seen)

    def batch_of(self, model: str) -> Callable[[BatchSeen], None]:
        """The observer of a model's batches, for whichever thread has run one."""
        return lambda seen: self._batches.append((model, seen))

    def watch(self, model: str, gauged: Gauged) -> None:
        """Registers a model's gauges, which are read each time that this reports."""
        self._gauged[model] = gauged

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self, interval_s: float) -> None:
        last = False
        while not last:
            last = self._stop.wait(interval_s)
            try:
                self._flush()
            except Exception:  # a failed report must not end all later ones
                log.exception("reporting metrics failed")

    def _flush(self) -> None:
        totals: collections.defaultdict[tuple[metrics.Counter, str, str], float] = collections.defaultdict(float)
        count = len(self._seen)
        stride = -(-count // _OBSERVED)
        for i in range(count):
            seen = self._seen.popleft()
            model = seen.model or "none"
            totals[self._requests, model, seen.outcome] += 1
            totals[self._oov, model, ""] += seen.oov_count
            if seen.outcome == "ok":
                totals[self._rows, model, ""] += seen.rows
                if i % stride:
                    continue
                for step, ms in (
                    ("queue", seen.queue_ms), ("encode", seen.encode_ms), ("device", seen.device_ms), ("total", seen.total_ms)
                ):  # fmt: skip
                    self._times[step].observe(ms, {"model": model})
        count = len(self._batches)
        stride = -(-count // _OBSERVED)
        for i in range(count):
            model, batch = self._batches.popleft()
            if i % stride == 0:
                self._fill.observe(batch.fill, {"model": model})
            totals[self._failed, model, ""] += batch.failed
            totals[self._busy, model, ""] += batch.device_ms
            totals[self._computed, model, ""] += batch.computed_rows
            totals[self._padding, model, ""] += 0 if batch.failed else batch.computed_rows - batch.rows
        for (counter, model, outcome), total in totals.items():
            if total > 0:  # Ray refuses to add nothing
                counter.inc(total, {"model": model, "outcome": outcome} if outcome else {"model": model})
        for model, gauged in list(self._gauged.items()):
            self._queued_rows.set(gauged.queued_rows, {"model": model})
            self._inflight_rows.set(gauged.inflight_rows, {"model": model})
