"""The service's metrics through Ray Serve, hence on Ray's Prometheus port with Serve's tags. Here alone metrics know Ray.

A Ray metric call takes 2 to 6 us and a request needs seven of them, so what ends is added up where it ends. A thread reports
the sums once a second. Histograms take one value a call: of each tenth of a second they get an even sample, as all of a second
at once kept the interpreter from those who answer.
"""

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

import ray
from ray.serve import metrics

from deployments.metrics import (
    DIFFERENCE_BOUNDS,
    FILL_BOUNDS,
    LATENCY_BOUNDS_MS,
    SCORE_BOUNDS,
    BatchSeen,
    Gauged,
    RequestSeen,
    Serving,
    ShadowSeen,
    Times,
)
from deployments.telemetry.batch_counts import BatchCounts
from deployments.telemetry.node_metrics import Endpoint
from deployments.telemetry.request_counts import RequestCounts
from deployments.telemetry.table_metrics import Of, TableMetrics, TableReader, tags_of
from dpiframe_core.errors import ConfigError

log = logging.getLogger(__name__)

_KEPT = 200_000  # records; more than a second's worth of anything, and a bound if the thread is starved
_TURNS = 10  # in which the records of one report are taken
_OBSERVED = 20  # values that a model's histogram gets of one turn: at 3,000 requests a second all of them took 6 % of a core

_STEPS = "queue", "encode", "device", "total"  # as a record has their times

_Totals = collections.defaultdict[tuple[metrics.Counter, Of, str], float]


class RayMetrics:
    """Make it inside a replica. `close` reports what is left."""

    def __init__(self, interval_s: float = 1.0) -> None:
        of = ("model", "version")
        self._requests = metrics.Counter("dpiframe_requests", "Requests by outcome.", (*of, "outcome"))
        self._rows = metrics.Counter("dpiframe_rows", "Rows scored for requests.", of)
        self._values = metrics.Counter("dpiframe_values", "Places for ids in the rows and contexts of requests.", of)
        self._oov = metrics.Counter("dpiframe_oov_values", "Values that met no vocabulary entry.", of)
        self._batches_run = metrics.Counter("dpiframe_batches", "Runs on a lane, failed ones too.", of)
        self._failed = metrics.Counter("dpiframe_failed_batches", "Runs that the device did not finish.", of)
        self._times = {
            step: metrics.Histogram(f"dpiframe_{step}_ms", f"Milliseconds of a request: {step}.", list(LATENCY_BOUNDS_MS), of)
            for step in _STEPS
        }
        self._scores = metrics.Histogram("dpiframe_scores", "A sample of the scores.", list(SCORE_BOUNDS), (*of, "task"))
        self._fill = metrics.Histogram("dpiframe_batch_fill", "Rows of a run over max_batch_rows.", list(FILL_BOUNDS), of)
        self._computed = metrics.Counter("dpiframe_computed_rows", "Rows that runs computed, padding included.", of)
        self._padding = metrics.Counter("dpiframe_padding_rows", "Those of them that filled up a bucket for nobody.", of)
        self._busy = metrics.Counter("dpiframe_device_busy_ms", "Milliseconds of device time, over all lanes.", of)
        self._active = metrics.Counter("dpiframe_device_active_ms", "Milliseconds with a run on at least one lane.", of)
        self._of_batches = self._batches_run, self._failed, self._busy, self._computed, self._padding
        self._queued_rows = metrics.Gauge("dpiframe_queued_rows", "Rows that wait for a lane.", of)
        self._inflight_rows = metrics.Gauge("dpiframe_inflight_rows", "Rows on a lane.", of)
        self._info = metrics.Gauge("dpiframe_model_info", "1: what is served.", (*of, "precision", "device"))
        self._ready = metrics.Gauge("dpiframe_model_ready", "1 while a replica takes requests for it, else 0.", of)
        shadow = (*of, "shadow")
        said = "|difference| of a version's scores from those of the one that answered, a sample."
        self._differences = metrics.Histogram("dpiframe_shadow_difference", said, list(DIFFERENCE_BOUNDS), shadow)
        self._shadows = metrics.Counter("dpiframe_shadow_requests", "Requests in a shadow by outcome.", (*shadow, "outcome"))
        self._shadowed: collections.deque[ShadowSeen] = collections.deque(maxlen=_KEPT)
        self._tables = TableMetrics(
            metrics.Counter("dpiframe_table_reads", "Reads of a sample's rows, by where they lay.", (*of, "tier")),
            metrics.Counter("dpiframe_table_rows_moved", "Rows that came into the GPU's memory.", of),
            metrics.Counter("dpiframe_far_rows", "Rows of files that requests asked for, by where they were.", (*of, "found")),
            metrics.Gauge("dpiframe_promoted_rows", "Rows of files that a memory keeps, as they are read.", (*of, "memory")),
        )
        self._pool = metrics.Gauge("dpiframe_device_pool_bytes", "What this process's pool holds of its device.", ())
        self._pool_bytes: Callable[[], int | None] = lambda: None
        self._unlogged = metrics.Counter("dpiframe_score_log_dropped", "Sampled requests that the score log lost.", of)
        self._dropped: collections.deque[tuple[Of, int]] = collections.deque(maxlen=_KEPT)
        self._answered: dict[tuple[str, str, str], dict[int, RequestCounts]] = {}
        self._batches: dict[Of, dict[int, BatchCounts]] = {}
        self._gauged: dict[Of, Gauged] = {}
        self._active_s: dict[Of, float] = {}
        self._gone: collections.deque[Of] = collections.deque()
        self._served: dict[Of, tuple[Serving, Callable[[], bool]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(interval_s,), name="metrics", daemon=True)
        self._thread.start()

    def request(self, seen: RequestSeen) -> None:
        """Any thread may call it."""
        of_threads = self._answered.get(seen[:3]) or self._answered.setdefault(seen[:3], {})
        thread = threading.get_ident()
        (of_threads.get(thread) or of_threads.setdefault(thread, RequestCounts(sampled=seen.outcome == "ok"))).add(seen)

    def shadow(self, seen: ShadowSeen) -> None:
        """Any thread may call it."""
        self._shadowed.append(seen)

    def unlogged(self, model: str, version: str, requests: int) -> None:
        """So many sampled requests are not in the score log. Any thread may call it."""
        self._dropped.append(((model, version), requests))

    def batch_of(self, model: str, version: str) -> Callable[[BatchSeen], None]:
        """The observer of a model's batches, for whichever thread has run one."""
        self._returned((model, version))
        of_threads = self._batches.setdefault((model, version), {})

        def observe(seen: BatchSeen) -> None:
            thread = threading.get_ident()
            (of_threads.get(thread) or of_threads.setdefault(thread, BatchCounts())).add(seen)

        return observe

    def watch(self, model: str, version: str, gauged: Gauged) -> None:
        """Registers a model's gauges, which are read each time that this reports."""
        self._returned((model, version))
        self._gauged[model, version] = gauged

    def reads_tables(self, model: str, version: str, engine: TableReader) -> None:
        """Registers where reads of a model's tables are served, and rows of files were found, since its start; asked each time
        that this reports.
        """
        self._returned((model, version))
        self._tables.register((model, version), engine)

    def holds(self, pool_bytes: Callable[[], int | None]) -> None:
        """Registers what this process holds of its device; None of none. Asked each time that this reports."""
        self._pool_bytes = pool_bytes

    def serves(self, info: Serving, ready: Callable[[], bool]) -> None:
        """Registers a model that requests are answered for here. `ready` is asked each time that this reports."""
        self._returned((info.name, info.version))
        self._served[info.name, info.version] = info, ready

    def forget(self, model: str, version: str) -> None:
        """It is served here no longer."""
        self._gone.append((model, version))

    def endpoints(self) -> Sequence[Endpoint]:
        """Where the nodes' pages are; blocks as `endpoints` does."""
        return endpoints()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self, interval_s: float) -> None:
        last, turns = False, 0
        while not last:
            last = self._stop.wait(interval_s / _TURNS)
            turns += 1
            try:
                self._flush() if last or turns % _TURNS == 0 else self._take()
            except Exception:  # a failed report must not end all later ones
                log.exception("reporting metrics failed")

    def _take(self) -> None:
        """What is told of single requests and runs: samples. The rest is sums."""
        for (model, version, outcome), requests in list(self._answered.items()):
            if outcome == "ok":
                for counts in list(requests.values()):
                    most = _OBSERVED // len(requests)
                    self._observe((model, version), counts.times(most), counts.scores(most))
        for of, runs in list(self._batches.items()):
            for batches in list(runs.values()):
                for fill in batches.sample(_OBSERVED // len(runs)):
                    self._fill.observe(fill, tags_of(of))
        self._take_shadows()

    def _flush(self) -> None:
        self._take()
        totals = self._added_up()
        while self._gone:
            self._unregister(self._gone.popleft())
        for of, gauged in list(self._gauged.items()):
            active_s = gauged.busy_s
            totals[self._active, of, ""] += (active_s - self._active_s.get(of, 0.0)) * 1e3
            self._active_s[of] = active_s
            self._queued_rows.set(gauged.queued_rows, tags_of(of))
            self._inflight_rows.set(gauged.inflight_rows, tags_of(of))
        self._tables.report()
        for _ in range(len(self._dropped)):
            of, requests = self._dropped.popleft()
            totals[self._unlogged, of, ""] += requests
        if (held := self._pool_bytes()) is not None:
            self._pool.set(held)
        for of, (info, ready) in list(self._served.items()):
            self._info.set(1, tags_of(of) | {"precision": info.precision, "device": info.device})
            self._ready.set(int(ready()), tags_of(of))
        for (counter, of, outcome), total in totals.items():
            if total > 0:  # Ray refuses to add nothing
                counter.inc(total, tags_of(of) | ({"outcome": outcome} if outcome else {}))

    def _returned(self, of: Of) -> None:
        with contextlib.suppress(ValueError):
            self._gone.remove(of)

    def _unregister(self, of: Of) -> None:
        """A gauge is shown with its last value for good: zero then."""
        self._tables.forget(of)
        self._batches.pop(of, None)
        for seen in [seen for seen in list(self._answered) if seen[:2] == of]:
            del self._answered[seen]
        if self._gauged.pop(of, None) is not None:
            self._active_s.pop(of, None)
            self._queued_rows.set(0, tags_of(of))
            self._inflight_rows.set(0, tags_of(of))
        if (known := self._served.pop(of, None)) is not None:
            self._info.set(0, tags_of(of) | {"precision": known[0].precision, "device": known[0].device})
            self._ready.set(0, tags_of(of))

    def _take_shadows(self) -> None:
        room = _OBSERVED
        counts: collections.Counter[tuple[Of, str, str]] = collections.Counter()
        for _ in range(len(self._shadowed)):
            seen = self._shadowed.popleft()
            of = seen.model, seen.version
            tags = tags_of(of) | {"shadow": seen.shadow}
            counts[of, seen.shadow, seen.outcome] += 1
            for difference in seen.differences[:room]:
                self._differences.observe(difference, tags)
            room -= len(seen.differences[:room])
        for (of, shadow, outcome), count in counts.items():
            self._shadows.inc(count, tags_of(of) | {"shadow": shadow, "outcome": outcome})

    def _added_up(self) -> _Totals:
        """Of requests and runs since the last report."""
        totals = _Totals(float)
        for (model, version, outcome), requests in list(self._answered.items()):
            of = model or "none", version or "none"
            for counts in list(requests.values()):
                count, rows, values, oov = counts.since()
                totals[self._requests, of, outcome] += count
                totals[self._rows, of, ""] += rows if outcome == "ok" else 0
                totals[self._values, of, ""] += values
                totals[self._oov, of, ""] += oov
        for of, runs in list(self._batches.items()):
            for batches in list(runs.values()):
                for counter, more in zip(self._of_batches, batches.since(), strict=True):
                    totals[counter, of, ""] += more
        return totals

    def _observe(self, of: Of, some: Sequence[Times], scores: Sequence[Sequence[float]]) -> None:
        for times in some:
            for step, ms in zip(_STEPS, times, strict=True):
                self._times[step].observe(ms, tags_of(of))
        if of not in self._served:  # unloaded since
            return
        for row in scores:
            for task, score in zip(self._served[of][0].tasks, row, strict=True):
                self._scores.observe(score, tags_of(of) | {"task": task})


def endpoints() -> list[Endpoint]:
    """Of the nodes that there are now. Blocks for as long as Ray's control service takes to name them."""
    return [Endpoint(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in ray.nodes() if node["Alive"]]


def require_port(port: int | None) -> None:
    """Raises ConfigError if a node's metrics are on another port: only who starts Ray decides it."""
    for found in endpoints() if port is not None else ():
        if found.port != port:
            got = f"got {port}, but node {found.host} was started with {found.port}"
            raise ConfigError(f"metrics.port: {got}, expected that one (ray start --metrics-export-port) or none")
