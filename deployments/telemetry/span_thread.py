"""Makes spans of finished requests, and has them sent. Here alone deployments know OpenTelemetry.

A request costs the event loop a few clock reads and one hand-over: spans are made afterwards, on a thread, with the times that
the request kept, those of the engine's process among them. What the thread or the collector cannot take is dropped.
"""

import logging
import threading
import time
from collections import deque
from typing import Any, Self

from deployments.config_observed import Tracing
from deployments.scoring.job import Job
from deployments.scoring.request_trace import Headers, RequestTrace, begun
from dpiframe_core.errors import ConfigError

log = logging.getLogger(__name__)

_MOST_WAITING = 1024  # requests
_TURN_S = 0.2
# Clients decide what is traced, and a request's spans take 160 us of the interpreter: these are 4 % of a core.
_MOST_A_TURN = 50
_SEND_S = 5  # at most, for one message to the collector
_CLOSE_S = 3.0


class SpanThread:
    """Owns the thread and what sends. `begin` and `end` are called on event loops; both take a microsecond or two."""

    def __init__(self, config: Tracing, application: str, exporter: Any = None) -> None:
        """`exporter`: in the place of OTLP over HTTP, for tests.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        self._sample = config.sample
        self._provider = _provider(config, application, exporter)
        self._tracer = self._provider.get_tracer("dpiframe")
        self._finished: deque[tuple[RequestTrace, Job, str, float]] = deque(maxlen=_MOST_WAITING)  # the oldest are dropped
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: Tracing | None, application: str) -> Self | None:
        return None if config is None else cls(config, application)

    def begin(self, headers: Headers, now: float) -> RequestTrace | None:
        return begun(headers, self._sample, now)

    def end(self, job: Job, outcome: str, now: float) -> None:
        if job.trace is not None:
            self._finished.append((job.trace, job, outcome, now))

    def close(self) -> None:
        """Sends what is left, if the collector takes it within three seconds."""
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        while not self._stop.wait(_TURN_S):
            self._make_spans(_MOST_A_TURN)
        self._make_spans(_MOST_WAITING)
        self._provider.shutdown()

    def _make_spans(self, most: int) -> None:
        # What the scoring's clock shows when the Unix clock shows this.
        offset_ns = time.time_ns() - round(time.monotonic() * 1e9)
        for _ in range(min(most, len(self._finished))):
            try:
                self._make(*self._finished.popleft(), offset_ns)
            except Exception:
                log.exception("a request's spans are lost")

    def _make(self, trace: RequestTrace, job: Job, outcome: str, ended: float, offset_ns: int) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def unix_ns(at: float) -> int:
            return round(at * 1e9) + offset_ns

        about = {
            "dpiframe.model": job.model,
            "dpiframe.version": job.version,
            "dpiframe.request_id": job.request_id,
            "dpiframe.rows": job.rows,
            "dpiframe.oov_count": job.oov_count,
            "dpiframe.outcome": outcome,
        }
        above, begins = TraceContextTextMapPropagator().extract(trace.parent), trace.started
        request = self._tracer.start_span("score", above, SpanKind.SERVER, about, start_time=unix_ns(begins))
        inside = set_span_in_context(request, above)
        for step, at in trace.marks:
            self._tracer.start_span(step, inside, start_time=unix_ns(begins)).end(unix_ns(at))
            begins = at
        if outcome not in ("ok", "cancelled"):
            request.set_status(Status(StatusCode.ERROR, outcome))
        request.end(unix_ns(ended))


def _provider(config: Tracing, application: str, exporter: Any) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError as error:
        raise ConfigError(f"tracing: got {error}, expected what `pip install -e '.[tracing]'` brings") from None
    # Who is traced is decided before: the provider's own sampler would ask the environment.
    provider = TracerProvider(
        sampler=ALWAYS_ON, resource=Resource.create({"service.name": application}), shutdown_on_exit=False
    )
    exporter = exporter or OTLPSpanExporter(config.endpoint, timeout=_SEND_S)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=8 * _MOST_WAITING,  # of a request's spans
            schedule_delay_millis=1000,
            export_timeout_millis=1000 * _SEND_S,
        )
    )
    return provider
