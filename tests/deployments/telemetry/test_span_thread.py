"""Spans of requests: in W3C's trace of who asked, one a step, with the engine's own times in both topologies."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deployments.batching.batcher import RowBatcher
from deployments.config import Limits, parse_config
from deployments.config_observed import Tracing
from deployments.fanin.acceptor import Acceptor
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.handshake import meeting_place
from deployments.fanin.scorer import FanInScorer
from deployments.scoring.catalog import Catalog
from deployments.scoring.job import Job
from deployments.scoring.request_trace import RequestTrace, begun
from deployments.scoring.scoring import Scoring
from deployments.scoring.served_model import ServedModel
from deployments.scoring.watchers import Watchers
from deployments.serve.http_app import build_app
from deployments.telemetry import span_thread
from deployments.telemetry.span_thread import SpanThread
from dpiframe_core.errors import ConfigError
from dpiframe_core.features.row_block import BatchResult, RowBlock
from tests.deployments.collector import Collector
from tests.deployments.protocol.test_rest import listed
from tests.deployments.serving_doubles import SCHEMA, FakeEngine, columns

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
STEPS = ["receive", "validate", "encode", "queue", "device", "answer"]
CONFIG = Tracing(endpoint="http://127.0.0.1:1/v1/traces", sample=0)


class Slow(FakeEngine):
    """Takes longer than the half millisecond that it tells."""

    def run_batch(self, blocks: Sequence[RowBlock]) -> BatchResult:
        time.sleep(0.002)
        return super().run_batch(blocks)


def spans_of(
    topology: str, *requests: tuple[str, Any, dict[str, str]], config: Tracing = CONFIG
) -> tuple[list[httpx.Response], Sequence[ReadableSpan]]:
    """The answers to requests (path, JSON, headers), and all spans."""
    exporter = InMemorySpanExporter()
    spans = SpanThread(config, "app", exporter)

    async def main() -> list[httpx.Response]:
        engine = Slow()
        acceptor = None
        if topology == "fanin":
            place, fingerprint = meeting_place("trace", str(os.getpid())), "f" * 64
            lanes: Any = FanInBatcher(
                engine.run_batch, SCHEMA.block_layout, 1, fingerprint, max_batch_rows=64, lanes=1, max_queued_rows=1000
            )
            acceptor = Acceptor(place, {"fake": lanes})
            scorer: Any = FanInScorer(place, "fake", fingerprint, SCHEMA.block_layout, 1, most_rows=2000)
            await scorer.found(1)
        else:
            scorer = RowBatcher(engine.run_batch, max_batch_rows=64, lanes=1, max_queued_rows=1000)
        limits = Limits()
        app = build_app(Catalog({"fake": ServedModel.of(engine, scorer, limits)}), limits, watchers=Watchers(tracer=spans))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            answers = [await client.post(path, json=body, headers=headers) for path, body, headers in requests]
        if acceptor is not None:
            await scorer.close()
            await asyncio.to_thread(acceptor.close, 5)
        else:
            await scorer.close(5)
        return answers

    answers = asyncio.run(main())
    spans.close()
    return answers, exporter.get_finished_spans()


def request(rows: int = 2) -> dict[str, Any]:
    return {"context": {"user": 1}, "candidates": columns(rows)}


def ms(span: ReadableSpan) -> float:
    assert span.end_time is not None
    assert span.start_time is not None
    return (span.end_time - span.start_time) / 1e6


@pytest.mark.parametrize("topology", ["colocated", "fanin"])
@pytest.mark.parametrize(("path", "body"), [("/v1/score", request()), ("/v2/models/fake/infer", listed())])
def test_a_request_is_a_span_of_the_trace_that_asked_for_it_with_one_inside_for_each_step(
    topology: str, path: str, body: Any
) -> None:
    before = time.time_ns()
    (answer,), spans = spans_of(topology, (path, body, ASKED | {"x-request-id": "r7"}))
    assert answer.status_code == 200
    by_name = {span.name: span for span in spans}
    assert sorted(by_name) == sorted([*STEPS, "score"])
    whole = by_name["score"]
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == SPAN
    assert whole.kind == SpanKind.SERVER
    assert whole.attributes is not None
    about = {key.removeprefix("dpiframe."): value for key, value in whole.attributes.items()}
    assert {key: about[key] for key in ("model", "version", "request_id", "outcome")} == {
        "model": "fake", "version": "7", "request_id": "r7", "outcome": "ok",
    }  # fmt: skip
    assert about["rows"] == 2
    assert whole.resource.attributes["service.name"] == "app"
    steps = [by_name[name] for name in STEPS]
    assert all(span.parent is not None and span.parent.span_id == whole.context.span_id for span in steps)
    assert steps[0].start_time == whole.start_time
    assert all(a.end_time == b.start_time for a, b in pairwise(steps))
    assert whole.start_time is not None
    assert before - 1e6 < whole.start_time < time.time_ns()
    assert ms(by_name["device"]) == pytest.approx(0.5, abs=1e-3)  # what the engine says, in its own process or not
    if path == "/v1/score":
        told = answer.json()["timing_ms"]
        assert ms(by_name["queue"]) == pytest.approx(told["queue"], abs=2e-3)
        assert ms(by_name["encode"]) == pytest.approx(told["encode"], abs=2e-3)
        assert ms(whole) >= told["total"] - 2e-3


def test_a_request_that_fails_has_the_steps_that_it_reached_and_says_why() -> None:
    bad = {"candidates": {"item": ["x"]}}
    answers, spans = spans_of("colocated", ("/v1/score", bad, ASKED), ("/v1/score", request(), {"traceparent": "none"}))
    assert [a.status_code for a in answers] == [422, 200]
    assert [span.name for span in spans] == ["receive", "score"]
    assert (spans[1].status.status_code, spans[1].status.description) == (StatusCode.ERROR, "invalid_input")


@pytest.mark.parametrize(
    ("traceparent", "sample", "traced"),
    [
        (f"00-{TRACE}-{SPAN}-01", 0.0, True),
        (f"00-{TRACE}-{SPAN}-00", 1.0, False),
        (f"00-{TRACE}-{SPAN}-03", 0.0, True),
        (f"cc-{TRACE}-{SPAN}-01-more", 0.0, True),
        (f"00-{'0' * 32}-{SPAN}-01", 0.0, False),
        (f"00-{TRACE}-{'0' * 16}-01", 0.0, False),
        (f"00-{TRACE.upper()}-{SPAN}-01", 0.0, False),
        ("", 1.0, True),
        ("é", 0.0, False),
    ],
)
def test_who_asked_has_decided_and_of_all_others_a_share_is_traced(traceparent: str, sample: float, traced: bool) -> None:
    headers = [(b"accept", b"*/*"), (b"traceparent", traceparent.encode("latin-1"))]
    assert (begun(headers, sample, 0.0) is not None) is traced


def test_without_tracing_a_request_has_no_trace_and_its_headers_are_not_read() -> None:
    def unread() -> Iterator[tuple[bytes, bytes]]:
        raise AssertionError
        yield b"", b""

    scoring = Scoring(Limits(), lambda seen: None)
    job = scoring.begin("r", unread())
    scoring.over(job, "receive")
    scoring.finish(job, "ok")
    assert job.trace is None


class Stuck(SpanExporter):
    def __init__(self) -> None:
        self.go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go.wait(30)
        return SpanExportResult.SUCCESS


def test_a_collector_that_stalls_costs_spans_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_thread, "_CLOSE_S", 0.1)
    stuck = Stuck()
    spans = SpanThread(CONFIG, "app", stuck)
    job = Job("r", 0.0, trace=RequestTrace({}, 0.0))
    for _ in range(20_000):
        spans.end(job, "ok", 1.0)
        assert len(spans._finished) <= span_thread._MOST_WAITING
    spans.close()
    stuck.go.set()
    spans._thread.join(30)
    assert not spans._thread.is_alive()


def test_clients_that_ask_for_a_trace_of_everything_cost_a_bounded_number_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_thread, "_TURN_S", 60)
    exporter = InMemorySpanExporter()
    spans = SpanThread(CONFIG, "app", exporter)
    job = Job("r", 0.0, trace=RequestTrace({}, 0.0))
    for _ in range(300):
        spans.end(job, "ok", 1.0)
    spans._make_spans(span_thread._MOST_A_TURN)
    assert len(spans._finished) == 300 - span_thread._MOST_A_TURN
    spans.close()  # which makes the rest
    assert len(exporter.get_finished_spans()) == 300


def test_spans_reach_a_collector_by_otlp_over_http() -> None:
    with Collector() as collector:
        spans = SpanThread(Tracing(endpoint=collector.endpoint), "ctr")
        job = Job("r", 10.0, trace=RequestTrace(dict(ASKED), 10.0, [("receive", 10.5)]))
        spans.end(job, "ok", 11.0)
        spans.close()
    assert {(path, kind) for path, kind, _ in collector.posted} == {("/v1/traces", "application/x-protobuf")}
    sent = collector.spans()
    assert [(span.name, span.trace_id.hex()) for span in sent] == [("receive", TRACE), ("score", TRACE)]
    assert sent[1].end_time_unix_nano - sent[1].start_time_unix_nano == 1_000_000_000


def test_without_what_sends_them_a_service_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing: got .*, expected what `pip install -e '.\[tracing\]'` brings"):
        SpanThread(CONFIG, "app")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"endpoint": "localhost:4318"}, "tracing.endpoint: got 'localhost:4318', expected"),
        ({"endpoint": "http://localhost:4318"}, "tracing.endpoint"),
        ({"endpoint": "http://c:4318/v1/traces", "sample": 2}, "tracing.sample: got 2"),
        ({"endpoint": "http://c:4318/v1/traces", "rate": 1}, "tracing.rate: got an unknown key"),
        ({}, "tracing.endpoint"),
    ],
)
def test_a_configuration_that_will_not_do_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({"models": [{"path": "m"}], "tracing": given}, "test")
