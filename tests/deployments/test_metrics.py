import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.metrics import BatchSeen, RequestSeen

with warnings.catch_warnings():  # Ray Serve 2.60 uses what pydantic has deprecated
    warnings.simplefilter("ignore")
    from deployments.serve import ray_metrics


class Recorder:
    """Stands in for Ray's metric classes: adds up counters, keeps observations and the last gauge."""

    calls: Counter[tuple[str, tuple[tuple[str, str], ...]]]
    observed: dict[str, list[float]]

    def __init__(self, name: str, description: str, *args: Any) -> None:
        self.name = name
        assert description

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        type(self).calls[self.name, tuple(tags.items())] += value  # type: ignore[assignment]

    def set(self, value: float, tags: dict[str, str]) -> None:
        type(self).calls[self.name, tuple(tags.items())] = value  # type: ignore[assignment]

    def observe(self, value: float, tags: dict[str, str]) -> None:
        type(self).observed.setdefault(self.name, []).append(value)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    Recorder.calls, Recorder.observed = Counter(), {}
    monkeypatch.setattr(ray_metrics, "metrics", SimpleNamespace(Counter=Recorder, Histogram=Recorder, Gauge=Recorder))
    return Recorder


def test_closing_reports_every_record_that_is_left(recorder: type[Recorder]) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.watch("m", SimpleNamespace(queued_rows=30, inflight_rows=4))
    for _ in range(3):
        metrics.request(RequestSeen("m", "ok", 100, 2, 0.1, 0.2, 0.3, 0.7))
    metrics.request(RequestSeen("", "not_json", 0, 0, 0, 0, 0, 0.1))
    metrics.batch_of("m")(BatchSeen(300, 384, 3, 0.5, 1.5, failed=False))
    metrics.batch_of("m")(BatchSeen(300, 0, 3, 0.5, 0.0, failed=True))
    assert not recorder.calls
    metrics.close()
    m = ("model", "m")
    assert dict(recorder.calls) == {
        ("dpiframe_requests", (m, ("outcome", "ok"))): 3,
        ("dpiframe_requests", (("model", "none"), ("outcome", "not_json"))): 1,
        ("dpiframe_rows", (m,)): 300,
        ("dpiframe_oov_values", (m,)): 6,
        ("dpiframe_failed_batches", (m,)): 1,
        ("dpiframe_device_busy_ms", (m,)): 1.5,
        ("dpiframe_computed_rows", (m,)): 384,
        ("dpiframe_padding_rows", (m,)): 84,
        ("dpiframe_queued_rows", (m,)): 30,
        ("dpiframe_inflight_rows", (m,)): 4,
    }
    assert recorder.observed["dpiframe_queue_ms"] == [0.1] * 3
    assert recorder.observed["dpiframe_total_ms"] == [0.7] * 3
    assert recorder.observed["dpiframe_batch_fill"] == [0.5, 0.5]


def test_a_busy_second_is_counted_whole_and_its_times_are_an_even_sample(recorder: type[Recorder]) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    for i in range(2500):
        metrics.request(RequestSeen("m", "ok", 10, 0, 0.1, 0.2, 0.3, float(i)))
        metrics.batch_of("m")(BatchSeen(10, 16, 1, i / 2500, 1.0, failed=False))
    metrics.close()
    assert recorder.calls["dpiframe_requests", (("model", "m"), ("outcome", "ok"))] == 2500
    assert recorder.calls["dpiframe_rows", (("model", "m"),)] == 25_000
    assert recorder.calls["dpiframe_computed_rows", (("model", "m"),)] == 40_000
    assert recorder.observed["dpiframe_total_ms"] == list(range(0, 2500, 5))
    assert len(recorder.observed["dpiframe_batch_fill"]) == 500


def test_a_failed_report_is_logged_and_does_not_end_the_next(
    recorder: type[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.watch("bad", SimpleNamespace())
    metrics.close()
    assert "reporting metrics failed" in caplog.text
