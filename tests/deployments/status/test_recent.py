"""What a replica answered lately: by the second, of the last two minutes."""

from functools import partial
from typing import Any

import httpx
import pytest

from deployments.metrics import LATENCY_BOUNDS_MS, RequestSeen
from deployments.status.recent import Recent
from tests.deployments.serve.test_http_app import Service, request


def seen(total_ms: float = 1.0, rows: int = 3, outcome: str = "ok") -> RequestSeen:
    return RequestSeen("m", "1", outcome, rows, 0, 0, 0.0, 0.0, 0.0, total_ms)


def test_each_ended_second_has_its_requests_rows_and_times_by_bucket() -> None:
    now = [1000.2]
    passed: list[RequestSeen] = []
    recent = Recent(passed.append, lambda: now[0])
    for ms in (0.05, 0.051, 7.0, 9999.0):
        recent.request(seen(ms))
    recent.request(seen(outcome="overloaded"))
    now[0] = 1002.9
    recent.request(seen())
    assert len(passed) == 6
    (second,) = recent.answer({}).seconds  # 1001 had none, 1002 has not ended
    buckets = {i: n for i, n in enumerate(second.latency) if n}
    assert (second.at, second.scored, second.failed, second.rows) == (1000, 4, 1, 12)
    assert buckets == {0: 1, 1: 1, LATENCY_BOUNDS_MS.index(7.5): 1, len(LATENCY_BOUNDS_MS): 1}


def test_what_is_older_than_two_minutes_is_gone() -> None:
    now = [0.0]
    recent = Recent(lambda seen: None, lambda: now[0])
    for second in range(400):
        now[0] = second + 0.5
        recent.request(seen())
    assert [s.at for s in recent.answer({}).seconds] == list(range(399 - 120, 399))
    now[0] = 500.0
    assert [s.at for s in recent.answer({}).seconds] == list(range(380, 400))
    now[0] = 1e6
    assert recent.answer({}).seconds == []


def test_the_route_counts_the_requests_of_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        first: dict[str, Any] = (await client.get("/v1/recent")).json()
        assert (first["seconds"], first["serving"]) == ([], {"fake": "7"})
        assert first["bounds_ms"] == list(LATENCY_BOUNDS_MS)
        for _ in range(3):
            assert (await client.post("/v1/score", json=request(2))).status_code == 200
        assert (await client.post("/v1/score", content=b"{")).status_code == 400
        clock[0] += 5
        later = (await client.get("/v1/recent")).json()
        assert later["replica"] == first["replica"]
        (second,) = later["seconds"]
        assert {key: second[key] for key in ("scored", "failed", "rows")} == {"scored": 3, "failed": 1, "rows": 6}
        assert sum(second["latency"]) == 3

    clock = [1000.0]
    monkeypatch.setattr("deployments.serve.http_app.Recent", partial(Recent, unix_time=lambda: clock[0]))
    Service().run(body)
