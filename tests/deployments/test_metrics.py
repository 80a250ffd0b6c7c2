import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.metrics import BatchSeen, RequestSeen, ShadowSeen
from deployments.scoring.score_sample import ScoreSample
from dpiframe_core.far_rows.far_reads import FarReads
from dpiframe_core.replan.replanner import TableReads

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

    def set(self, value: float, tags: Mapping[str, str] = MappingProxyType({})) -> None:
        type(self).calls[self.name, tuple(tags.items())] = value  # type: ignore[assignment]

    def observe(self, value: float, tags: dict[str, str]) -> None:
        type(self).observed.setdefault(self.name, []).append(value)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    Recorder.calls, Recorder.observed = Counter(), {}
    monkeypatch.setattr(ray_metrics, "metrics", SimpleNamespace(Counter=Recorder, Histogram=Recorder, Gauge=Recorder))
    return Recorder


def answered(total_ms: float = 0.7, rows: int = 100, sampled: Sequence[Sequence[float]] = ()) -> RequestSeen:
    return RequestSeen("m", "1", "ok", rows, 5 * rows, 2, 0.1, 0.2, 0.3, total_ms, sampled)


def serving(*tasks: str) -> Any:
    return SimpleNamespace(name="m", version="1", tasks=tasks, precision="tf32", device="cuda:0")


def test_closing_reports_every_record_that_is_left(recorder: type[Recorder]) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.watch("m", "1", SimpleNamespace(queued_rows=30, inflight_rows=4, busy_s=0.25))
    metrics.serves(serving("click", "buy"), lambda: True)
    for i in range(3):
        metrics.request(answered(sampled=[[0.1 * i, 0.5]] if i else []))
    metrics.request(RequestSeen("m", "1", "deadline_exceeded", 0, 0, 0, 0, 0, 0, 0.1))
    metrics.request(RequestSeen("", "", "not_json", 0, 0, 0, 0, 0, 0, 0.1))
    metrics.batch_of("m", "1")(BatchSeen(300, 384, 3, 0.5, 1.5, failed=False))
    metrics.batch_of("m", "1")(BatchSeen(300, 0, 3, 0.5, 0.0, failed=True))
    assert not recorder.calls
    metrics.close()
    m = (("model", "m"), ("version", "1"))
    assert dict(recorder.calls) == {
        ("dpiframe_requests", (*m, ("outcome", "ok"))): 3,
        ("dpiframe_requests", (*m, ("outcome", "deadline_exceeded"))): 1,
        ("dpiframe_requests", (("model", "none"), ("version", "none"), ("outcome", "not_json"))): 1,
        ("dpiframe_rows", m): 300,
        ("dpiframe_values", m): 1500,
        ("dpiframe_oov_values", m): 6,
        ("dpiframe_batches", m): 2,
        ("dpiframe_failed_batches", m): 1,
        ("dpiframe_device_busy_ms", m): 1.5,
        ("dpiframe_device_active_ms", m): 250,
        ("dpiframe_computed_rows", m): 384,
        ("dpiframe_padding_rows", m): 84,
        ("dpiframe_queued_rows", m): 30,
        ("dpiframe_inflight_rows", m): 4,
        ("dpiframe_model_info", (*m, ("precision", "tf32"), ("device", "cuda:0"))): 1,
        ("dpiframe_model_ready", m): 1,
    }
    assert recorder.observed["dpiframe_queue_ms"] == [0.1] * 3
    assert recorder.observed["dpiframe_total_ms"] == [0.7] * 3
    assert recorder.observed["dpiframe_batch_fill"] == [0.5, 0.5]
    assert recorder.observed["dpiframe_scores"] == [0.1, 0.5, 0.2, 0.5]


def test_a_model_that_takes_no_requests_is_served_and_not_ready(recorder: type[Recorder]) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.serves(serving("click"), lambda: False)
    metrics.close()
    ready, info = recorder.calls.pop(("dpiframe_model_ready", (("model", "m"), ("version", "1")))), recorder.calls
    assert ready == 0
    assert list(info.values()) == [1]


def test_a_busy_turn_is_counted_whole_and_its_times_and_scores_are_an_even_sample(recorder: type[Recorder]) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.serves(serving("click"), lambda: True)
    for i in range(2500):
        metrics.request(answered(float(i), rows=10, sampled=[[i / 2500], [i / 2500 + 1]]))
        metrics.batch_of("m", "1")(BatchSeen(10, 16, 1, i / 2500, 1.0, failed=False))
    metrics.close()
    m = (("model", "m"), ("version", "1"))
    assert recorder.calls["dpiframe_requests", (*m, ("outcome", "ok"))] == 2500
    assert recorder.calls["dpiframe_rows", m] == 25_000
    assert recorder.calls["dpiframe_computed_rows", m] == 40_000
    assert recorder.observed["dpiframe_total_ms"] == list(range(0, 2500, 125))
    assert len(recorder.observed["dpiframe_batch_fill"]) == 20
    assert recorder.observed["dpiframe_scores"] == [i / 2500 for i in range(0, 2500, 125)]


def test_a_shadow_is_counted_whole_and_its_differences_are_a_sample(recorder: type[Recorder]) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    for i in range(40):
        metrics.shadow(ShadowSeen("m", "1", "2", "ok", [i / 100] * 15))
    metrics.shadow(ShadowSeen("m", "1", "2", "dropped"))
    metrics.shadow(ShadowSeen("m", "1", "3", "unavailable"))
    metrics.close()
    of = (("model", "m"), ("version", "1"))
    assert recorder.calls == {
        ("dpiframe_shadow_requests", (*of, ("shadow", "2"), ("outcome", "ok"))): 40,
        ("dpiframe_shadow_requests", (*of, ("shadow", "2"), ("outcome", "dropped"))): 1,
        ("dpiframe_shadow_requests", (*of, ("shadow", "3"), ("outcome", "unavailable"))): 1,
    }
    assert recorder.observed["dpiframe_shadow_difference"] == [0.0] * 15 + [0.01] * 5


def test_the_gauges_of_what_is_unloaded_end_at_zero_unless_it_comes_back(recorder: type[Recorder]) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    for version in ("1", "2"):
        metrics.watch("m", version, SimpleNamespace(queued_rows=3, inflight_rows=4, busy_s=0.0))
        metrics.serves(
            SimpleNamespace(name="m", version=version, tasks=("click",), precision="fp32", device="cpu"), lambda: True
        )
    metrics.forget("m", "1")
    metrics.forget("m", "2")
    metrics.serves(SimpleNamespace(name="m", version="2", tasks=("click",), precision="fp32", device="cpu"), lambda: True)
    metrics.request(answered(sampled=[[0.5]]))  # it was answered before, and is counted
    metrics.close()
    for name in ("queued_rows", "inflight_rows", "model_ready"):
        assert recorder.calls[f"dpiframe_{name}", (("model", "m"), ("version", "1"))] == 0
        assert recorder.calls[f"dpiframe_{name}", (("model", "m"), ("version", "2"))] > 0
    assert recorder.calls["dpiframe_requests", (("model", "m"), ("version", "1"), ("outcome", "ok"))] == 1


def test_scores_of_a_quiet_second_are_all_kept_and_of_a_busy_one_200_of_all_places() -> None:
    sample = ScoreSample()
    few = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
    assert sample.of(few, 10.0) == few.tolist()
    rows = np.arange(1000, dtype=np.float32)[:, None]
    kept: list[list[float]] = []
    for i in range(100):  # a busy second begins, and its rate is not known
        kept += sample.of(rows, 10.5 + i / 1000)
    assert 200 < len(kept) < 200 * (2 + np.log(100_000 / 200))  # the n-th row is taken with 200 / n
    kept.clear()
    for i in range(100):  # of 100,000 rows a second
        kept += sample.of(rows, 11.0 + i / 101)
    assert len(kept) == 200
    assert {int(score) // 200 for (score,) in kept} == set(range(5))
    assert len(sample.of(few, 13.0)) <= 1
    assert sample.of(few, 14.1) == few.tolist()


def test_a_failed_report_is_logged_and_does_not_end_the_next(
    recorder: type[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.watch("bad", "1", SimpleNamespace())
    metrics.close()
    assert "reporting metrics failed" in caplog.text


def test_where_rows_of_tables_are_read_is_reported_by_what_it_grew(recorder: type[Recorder]) -> None:
    engine = SimpleNamespace(table_reads=TableReads(hot=5, host=1), far_reads=None)
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.reads_tables("m", "1", engine)
    metrics.reads_tables("whole", "1", SimpleNamespace(table_reads=None, far_reads=None))
    engine.table_reads = TableReads(hot=15, peers=2, host=1, rows_moved=7)
    metrics._flush()
    metrics.close()
    m = (("model", "m"), ("version", "1"))
    assert dict(recorder.calls) == {
        ("dpiframe_table_reads", (*m, ("tier", "hot"))): 10,
        ("dpiframe_table_reads", (*m, ("tier", "peers"))): 2,
        ("dpiframe_table_rows_moved", m): 7,
    }


def test_where_rows_of_files_were_found_and_how_many_are_promoted_is_reported_until_the_model_is_gone(
    recorder: type[Recorder],
) -> None:
    engine = SimpleNamespace(table_reads=None, far_reads=FarReads(memory=5, file=3))
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.reads_tables("m", "1", engine)
    engine.far_reads = FarReads(promoted=2, memory=5, file=7, near=4, staying=6)
    metrics._flush()
    m = (("model", "m"), ("version", "1"))
    counted: dict[Any, float] = {
        ("dpiframe_far_rows", (*m, ("found", "promoted"))): 2,
        ("dpiframe_far_rows", (*m, ("found", "file"))): 4,
    }
    kept = [("dpiframe_promoted_rows", (*m, ("memory", memory))) for memory in ("gpu", "host")]
    assert dict(recorder.calls) == counted | dict(zip(kept, (4, 6), strict=True))
    metrics.forget("m", "1")
    metrics.close()
    assert dict(recorder.calls) == counted | dict.fromkeys(kept, 0)


def test_what_the_score_log_lost_and_what_a_process_holds_of_its_device_are_told(recorder: type[Recorder]) -> None:
    metrics = ray_metrics.RayMetrics(interval_s=1000)
    metrics.unlogged("m", "1", 3)
    metrics.unlogged("m", "1", 4)
    metrics.holds(lambda: 2**20)
    metrics.close()
    lost = ("dpiframe_score_log_dropped", (("model", "m"), ("version", "1")))
    assert dict(recorder.calls) == {lost: 7, ("dpiframe_device_pool_bytes", ()): 2**20}
    recorder.calls.clear()
    ray_metrics.RayMetrics(interval_s=1000).close()  # on a CPU
    assert not recorder.calls


def test_runs_of_a_model_that_comes_back_before_a_report_are_counted_and_nothing_is_kept_of_one_that_is_gone(
    recorder: type[Recorder],
) -> None:
    metrics, seen = ray_metrics.RayMetrics(interval_s=1000), BatchSeen(10, 16, 1, 0.5, 1.0, failed=False)
    for version in ("1", "2"):
        metrics.batch_of("m", version)(seen)
        metrics.request(answered()._replace(version=version))
        metrics.forget("m", version)
    again = metrics.batch_of("m", "2")
    metrics._flush()
    again(seen)
    metrics.close()
    assert recorder.calls["dpiframe_batches", (("model", "m"), ("version", "1"))] == 1
    assert recorder.calls["dpiframe_batches", (("model", "m"), ("version", "2"))] == 2
    assert list(metrics._batches) == [("m", "2")]
    assert list(metrics._answered) == [("m", "2", "ok")]
