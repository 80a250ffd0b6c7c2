"""Binary requests over the direct port of an ingress: what C answers from end to end is what Python answers, errors too."""

import asyncio
import json
import re
import socket
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.access.gate import Gate
from deployments.config import Limits
from deployments.direct.express import Express
from deployments.fanin.acceptor import Acceptor
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.handshake import meeting_place
from deployments.fanin.scorer import FanInScorer
from deployments.metrics import LATENCY_BOUNDS_MS, RequestSeen
from deployments.scoring.catalog import Catalog, Share
from deployments.scoring.served_model import ServedModel
from deployments.serve.http_app import build_app
from tests.deployments.access.token_files import made
from tests.deployments.direct.direct_app import served
from tests.deployments.direct.test_direct_port import Client
from tests.deployments.fanin.doubles import FINGERPRINT
from tests.deployments.serving_doubles import SCHEMA, FakeEngine, until

LIMITS = Limits(max_body_bytes=20_000, max_rows_per_request=100)
GOOD = 5  # the first item of requests that are scored


def body(rows: int = 3, first: int = GOOD, *, bias: float = 0.25, **parameters: Any) -> tuple[bytes, int]:
    """A binary request of whole sections, and the bytes of its envelope."""
    ids = np.zeros((rows, 5), np.int64)
    ids[:, 0], ids[:, 1] = first + np.arange(rows), 3
    sections = {
        "context_ids": ("INT32", np.array([[7]], np.int32)),
        "candidate_ids": ("INT64", ids),
        "candidate_dense": ("FP32", np.full((rows, 2), bias, np.float32)),
    }
    inputs = [
        {"name": name, "datatype": kind, "shape": list(values.shape), "parameters": {"binary_data_size": values.nbytes}}
        for name, (kind, values) in sections.items()
    ]
    envelope = {"id": "q", "parameters": {"binary_data_output": True, **parameters}, "inputs": inputs}
    header = json.dumps(envelope).encode()
    return header + b"".join(values.tobytes() for _, values in sections.values()), len(header)


def post(*headers: str, version: str = "", how: tuple[bytes, int] | None = None, **asked: Any) -> bytes:
    content, length = how or body(**asked)
    lines = [f"POST /v2/models/fake{version}/infer HTTP/1.1", "Host: a", f"Inference-Header-Content-Length: {length}", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def expected(rows: int = 3, first: int = GOOD) -> list[float]:
    return [float(np.float32(first + i) / np.float32(1000) + np.float32(0.25)) for i in range(rows)]


def scores(answer: tuple[int, dict[str, str], bytes]) -> list[float]:
    status, headers, content = answer
    assert status == 200, content
    return np.frombuffer(content[int(headers["inference-header-content-length"]) :], np.float32).tolist()  # type: ignore[no-any-return]


class Ingress:
    """An ingress and engines of its node in this process. In C's way, what is `learned` goes past Python."""

    def __init__(
        self, in_c: bool, *engines: FakeEngine, limits: Limits = LIMITS, gate: Gate | None = None, queued: int = 1000
    ) -> None:
        self.in_c, self.engines, self.limits, self.gate, self.queued = in_c, engines or (FakeEngine(),), limits, gate, queued
        self.seen: list[RequestSeen] = []
        self.in_python = 0  # requests that were begun there
        self._clients: list[Client] = []

    def run(self, test: Callable[["Ingress"], Awaitable[None]]) -> list[RequestSeen]:
        """What was seen, each request apart: those that C has added up have their means, and the first of them the sample."""
        asyncio.run(self._main(test))
        first = [(i == 0, one._replace(requests=1, times=None)) for one in self.seen for i in range(one.requests)]
        return [one if is_first else one._replace(sampled=()) for is_first, one in first]

    async def _main(self, test: Callable[["Ingress"], Awaitable[None]]) -> None:
        self.batchers, self.catalog, self.scorers = {}, Catalog(), {}
        place = meeting_place("express", uuid.uuid4().hex)
        for engine in self.engines:
            version = engine.manifest.version
            self.batchers[version] = FanInBatcher(
                engine.run_batch, SCHEMA.block_layout, len(engine.manifest.tasks), FINGERPRINT,
                max_batch_rows=64, lanes=1, max_queued_rows=self.queued,
            )  # fmt: skip
        self.acceptor = Acceptor(place, self.batchers)
        for engine in self.engines:
            version, tasks = engine.manifest.version, len(engine.manifest.tasks)
            scorer = FanInScorer(place, version, FINGERPRINT, SCHEMA.block_layout, tasks, most_rows=2000)
            await scorer.found(1)
            self.scorers[version] = scorer
            self.catalog.add(ServedModel.of(engine, scorer, self.limits))
        first = self.engines[0].manifest.version
        self.live = self.catalog.loaded("fake", first)
        self.catalog.route({"fake": self.live}, {})
        self.app = build_app(self.catalog, self.limits, self.seen.append, self.gate)
        try:
            async with served(self.app, self.limits) as (self.server, self.port):
                self._count()
                await test(self)
        finally:
            for client in self._clients:
                client.writer.close()
            for engine in self.engines:
                engine.go.set()
            for scorer in self.scorers.values():
                await scorer.close()
            await asyncio.to_thread(self.acceptor.close, 5)

    def _count(self) -> None:
        begin = self.server._routes.begin

        def counted(*given: Any) -> Any:
            self.in_python += 1
            return begin(*given)

        self.server._routes.begin = counted  # type: ignore[method-assign]

    async def client(self) -> Client:
        self._clients.append(Client(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self._clients[-1]

    async def ask(self, client: Client, sent: bytes) -> tuple[int, dict[str, str], bytes]:
        client.send(sent)
        return await client.answer()

    async def learned(self, client: Client, sent: bytes) -> None:
        """Has that form go the way that is tested."""
        express = self.server._express
        before = len(express._learned)
        async with asyncio.timeout(20):
            while len(express._learned) == before and self.in_c:
                assert (await self.ask(client, sent))[0] == 200
        if not self.in_c:
            assert (await self.ask(client, sent))[0] == 200
        begun = self.in_python
        assert (await self.ask(client, sent))[0] == 200
        assert (self.in_python == begun) == self.in_c
        self.server._express.count()
        self.seen.clear()


@pytest.fixture(params=["python", "c"])
def in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "python":
        monkeypatch.setattr(Express, "learn", lambda *_: None)
    return bool(request.param == "c")


def masked(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, dict[str, str], bytes]:
    """But for what differs each time: the times, and so some lengths, and the id."""
    status, headers, content = answer
    headers = {k: v for k, v in headers.items() if k not in ("x-request-id", "date", "content-length")}
    headers.pop("inference-header-content-length", None)
    return status, headers, re.sub(rb'"(queue|encode|device)_ms":\d+\.\d{3}\b', rb'"\1_ms":T', content)


def test_both_ways_answer_the_same_bytes_and_count_the_same() -> None:
    given, seen, sampled = [], [], []
    for way in (False, True):
        ingress = Ingress(way)

        async def test(at: Ingress, way: bool = way) -> None:
            client = await at.client()
            if way:
                await at.learned(client, post())
                await at.learned(client, post(rows=1))
            before = at.in_python
            for sent in (post(), post(first=90), post(rows=1)):
                status, headers, content = await at.ask(client, sent)
                length = int(headers["inference-header-content-length"])
                assert re.fullmatch("[0-9a-f]{16}", headers["x-request-id"])
                assert len(content) - length == 4 * json.loads(content[:length])["outputs"][0]["shape"][0]
                given.append(masked((status, headers, content)))
            assert at.in_python - before == (0 if way else 3)

        last = ingress.run(test)[-3:]
        seen += [sorted((*one[:6], one.device_ms) for one in last)]
        sampled += [sorted(score for one in last for score in one.sampled)]
    assert given[:3] == given[3:]
    assert seen[0] == seen[1] == [("fake", "7", "ok", n, 1 + 5 * n, 0, 0.5) for n in (1, 3, 3)]
    assert sampled[0] == sampled[1]
    assert len(sampled[0]) == 7


def test_of_a_load_that_begins_the_metrics_get_no_more_scores_than_they_show(in_c: bool) -> None:
    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post(rows=60))
        for _ in range(60):
            await at.ask(client, post(rows=60))

    seen = Ingress(in_c).run(test)
    sampled = [score for one in seen for (score,) in one.sampled]
    assert len(seen) == 60
    assert 200 <= len(sampled) < 60 * 60 // 2  # the n-th row is taken with 200 / n
    assert set(sampled) <= set(expected(60))


def test_c_adds_requests_up_by_latency_and_keeps_the_times_of_all_as_long_as_they_are_few() -> None:
    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        for _ in range(90):
            await at.ask(client, post())

    ingress = Ingress(True)
    ingress.run(test)
    seen = [one for one in ingress.seen if one.times is not None]
    times = [each for one in seen for each in one.times or ()]
    assert len(times) == 90
    buckets = Counter[int]()
    for one in seen:
        buckets[bisect_left(LATENCY_BOUNDS_MS, one.total_ms)] += one.requests
    assert buckets == Counter(bisect_left(LATENCY_BOUNDS_MS, total_ms) for *_, total_ms in times)
    sums = [sum(one.requests * one[i] for one in seen) for i in range(6, 10)]
    np.testing.assert_allclose(sums, np.sum(times, 0), rtol=1e-9)
    assert sums[2] == pytest.approx(90 * 0.5)  # the engine says so


def told(answer: tuple[int, dict[str, str], bytes], status: int, message: str) -> None:
    got, headers, content = answer
    assert (got, headers["content-type"]) == (status, "application/json"), content
    assert re.fullmatch("[0-9a-f]{16}", headers["x-request-id"])
    assert json.loads(content) == {"error": message}


def test_a_value_that_is_no_id_or_number_is_refused_with_its_place(in_c: bool) -> None:
    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        told(await at.ask(client, post(first=998)), 422, "candidate_ids[2, 0]: got 1000, expected an id of item from 0 to 999")
        message = "candidate_dense[0, 0]: got inf, expected a finite number for price"
        told(await at.ask(client, post(bias=np.inf)), 422, message)
        assert scores(await at.ask(client, post())) == expected()

    assert [one.outcome for one in Ingress(in_c).run(test)] == ["invalid_input", "invalid_input", "ok"]


def test_scores_that_are_not_finite_are_refused(in_c: bool) -> None:
    engine = FakeEngine()
    run = engine.run_batch

    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        told(
            await at.ask(client, post(bias=3e38)),
            422,
            "candidates[0]: got inf, expected feature values for which the score is finite",
        )
        assert scores(await at.ask(client, post())) == expected()

    def doubled(blocks: Any) -> Any:
        result = run(blocks)
        return result._replace(scores=np.where(result.scores > 1e38, np.float32(np.inf), result.scores))

    engine.run_batch = doubled  # type: ignore[method-assign]
    assert [one.outcome for one in Ingress(in_c, engine).run(test)] == ["invalid_input", "ok"]


def test_a_failed_batch_is_503_and_the_next_request_is_scored(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        engine.fault = RuntimeError("the fake failed")
        told(await at.ask(client, post()), 503, "device: got an error on this request's batch, expected scores")
        engine.fault = None
        assert scores(await at.ask(client, post())) == expected()

    assert [one.outcome for one in Ingress(in_c, engine).run(test)] == ["unavailable", "ok"]


def test_a_deadline_passes_on_the_device_and_in_the_queue(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        client, other = await at.client(), await at.client()
        await at.learned(client, post(deadline_ms=1500))
        engine.go.clear()
        client.send(post(deadline_ms=1500))
        await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 3)
        other.send(post(deadline_ms=1500, first=9))
        for one in (client, other):
            told(await one.answer(), 504, "deadline: got past it in the queue or on the device, expected the scores before it")
        engine.go.set()
        await until(lambda: not at.batchers["7"].dispatcher.queued_rows)
        assert scores(await at.ask(client, post(deadline_ms=1500))) == expected()

    assert [one.outcome for one in Ingress(in_c, engine).run(test)] == ["deadline_exceeded"] * 2 + ["ok"]


def test_more_than_may_wait_is_429_with_the_time_to_wait(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        first, second, third = [await at.client() for _ in range(3)]
        await at.learned(first, post(rows=6))
        engine.go.clear()
        first.send(post(rows=6))
        await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 6)
        second.send(post(rows=6))
        await until(lambda: at.scorers["7"].queued_rows == 6)
        before = at.in_python
        status, headers, content = await at.ask(third, post(rows=6))
        assert at.in_python - before == (not in_c)  # refused before Python has read it: it would encode it first
        wait_ms = int(headers["retry-after-ms"])  # from the batches timed so far: what it comes to is the machine's
        assert (status, wait_ms > 0) == (429, True)
        waiting = "queue: got 6 rows waiting, expected at most 4"
        assert json.loads(content) == {"error": f"{waiting}; retry after {wait_ms / 1000:.3f} s"}
        engine.go.set()
        for one in (first, second):
            assert scores(await one.answer()) == expected(6)

    assert sorted(one.outcome for one in Ingress(in_c, engine, queued=10).run(test)) == ["ok", "ok", "overloaded"]


def test_a_client_that_hangs_up_is_taken_out_of_the_queue_and_counted(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        client, gone = await at.client(), await at.client()
        await at.learned(client, post())
        engine.go.clear()
        client.send(post())
        await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 3)
        gone.send(post(first=50))
        await until(lambda: at.server.connections == 2)
        await asyncio.sleep(0.05)
        gone.writer.close()
        await until(lambda: at.server.connections == 1)
        engine.go.set()
        assert scores(await client.answer()) == expected()
        batches = len(engine.batches)
        assert scores(await at.ask(client, post())) == expected()
        assert len(engine.batches) == batches + 1  # the one that nobody waits for was not run

    assert sorted(one.outcome for one in Ingress(in_c, engine).run(test)) == ["cancelled", "ok", "ok"]


def test_an_engine_that_goes_takes_its_requests_along(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        engine.go.clear()
        client.send(post())
        await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 3)
        for peer in at.batchers["7"]._peers:  # as a death of its process does
            peer.sock.shutdown(socket.SHUT_RDWR)
        told(await client.answer(), 503, "engine: got its end with this request there, expected scores")
        engine.go.set()
        await until(lambda: at.live.scorer.accepting)
        assert scores(await at.ask(client, post())) == expected()

    assert [one.outcome for one in Ingress(in_c, engine).run(test)] == ["unavailable", "ok"]


def test_an_engine_that_ends_one_connection_alone_takes_its_requests_along(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        engine.go.clear()
        client.send(post())
        await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 3)
        at.batchers["7"]._peers[-1].sock.shutdown(socket.SHUT_RDWR)  # C's, if it has one
        told(await client.answer(), 503, "engine: got its end with this request there, expected scores")
        engine.go.set()
        await until(lambda: at.live.scorer.accepting)
        begun = at.in_python
        await until(lambda: len(at.server._express._tracks) == at.in_c)
        assert scores(await at.ask(client, post())) == expected()
        assert at.in_python == begun + (not at.in_c)  # what is known goes on over the connection that was made anew

    assert [one.outcome for one in Ingress(in_c, engine).run(test)] == ["unavailable", "ok"]


def test_a_version_that_goes_live_answers_the_next_request_and_a_canary_its_share(in_c: bool) -> None:
    old, new = FakeEngine(), FakeEngine(version="8")

    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        other = at.catalog.loaded("fake", "8")
        at.catalog.route({"fake": other}, {})
        version = lambda answer: json.loads(answer[2].partition(b"}]}")[0] + b"}]}")["model_version"]  # noqa: E731
        assert version(await at.ask(client, post())) == "8"
        await at.learned(client, post())
        assert version(await at.ask(client, post())) == "8"
        at.catalog.route({"fake": other}, {"fake": Share(canary=at.live, percent=100.0)})
        for _ in range(3):
            assert version(await at.ask(client, post())) == "7"
        assert version(await at.ask(client, post(version="/versions/8"))) == "8"

    Ingress(in_c, old, new).run(test)


def test_requests_in_flight_keep_their_version_in_use(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        engine.go.clear()
        client.send(post())
        await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 3)
        over = asyncio.create_task(at.live.in_use.over())
        await asyncio.sleep(0.05)
        assert not over.done()
        engine.go.set()
        assert scores(await client.answer()) == expected()
        await asyncio.wait_for(over, 60)

    Ingress(in_c, engine).run(test)


def test_two_listeners_of_a_process_have_a_connection_each_and_both_end_with_the_engine(in_c: bool) -> None:
    """The direct port and that of Serve's server: a version is in use while a request of either is open."""
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        direct, port = at.server, at.port
        await at.learned(await at.client(), post())
        async with served(at.app, at.limits) as (at.server, at.port):
            at._count()
            client = await at.client()
            await at.learned(client, post())
            (connection,) = at.live.scorer.connections
            assert len(connection.besides) == 2 * in_c
            engine.go.clear()
            client.send(post())
            await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 3)
            assert not connection.idle
            over = asyncio.create_task(at.live.in_use.over())
            await asyncio.sleep(0.05)
            assert not over.done()
            engine.go.set()
            assert scores(await client.answer()) == expected()
            await asyncio.wait_for(over, 60)
            for peer in at.batchers["7"]._peers:  # as a death of its process does
                peer.sock.shutdown(socket.SHUT_RDWR)
            await until(lambda: not connection.alive)
            assert connection.besides == []
            await until(lambda: at.live.scorer.accepting)
            assert scores(await at.ask(client, post())) == expected()
        at.server, at.port = direct, port
        assert scores(await at.ask(await at.client(), post())) == expected()

    Ingress(in_c, engine).run(test)


def test_requests_behind_one_another_are_answered_in_their_order(in_c: bool) -> None:
    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        client.send(b"".join(post(first=i) for i in range(30)) + b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" + post()[:-9])
        for i in range(30):
            assert scores(await client.answer()) == expected(first=i)
        assert (await client.answer())[2] == b'{"status":"live"}'
        client.send(post()[-9:])
        assert scores(await client.answer()) == expected()

    assert len(Ingress(in_c).run(test)) == 31


@pytest.mark.parametrize(
    ("lines", "told_id"),
    [
        (["X-Request-ID: mine 1"], "mine 1"),
        (["x-request-id:\t~ \t "], "~"),
        (["X-Request-Id: " + "x" * 128], "x" * 128),
        (["X-Request-ID: " + "x" * 129], None),
        (["X-Request-ID: "], None),
        (["X-Request-ID: caf\xe9"], None),
        (["X-Request-ID: caf\xe9", "x-request-id: second", "X-Request-ID: third"], "second"),
        (["traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate: a=b", "X-Request-ID: z"], "z"),
    ],
)
def test_a_client_s_own_request_id_comes_back(in_c: bool, lines: list[str], told_id: str | None) -> None:
    """And a head that is like another one but for ids and traces is known."""

    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post("A: 1", *lines, "B: 2"))
        begun = at.in_python
        for sent, wanted in ((lines, told_id), ([], None), (["x-request-id: other", "tracestate: c=d"], "other")):
            answer = await at.ask(client, post("A: 1", *sent, "B: 2"))
            assert scores(answer) == expected()
            assert re.fullmatch(re.escape(wanted) if wanted else "[0-9a-f]{16}", answer[1]["x-request-id"])
        assert (at.in_python == begun) == in_c
        answer = await at.ask(client, post("A: 1", "X-Request-ID: refused", "B: 2", first=-1))
        assert (answer[0], answer[1]["x-request-id"]) == (422, "refused")

    Ingress(in_c).run(test)


def test_a_drain_answers_what_is_in_flight_and_ends_its_connection(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        busy, idle = await at.client(), await at.client()
        await at.learned(busy, post())
        engine.go.clear()
        busy.send(post())
        await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 3)
        drained = asyncio.create_task(at.server.drain(10))
        assert await idle.closed()
        engine.go.set()
        answer = await busy.answer()
        assert (scores(answer), answer[1]["connection"]) == (expected(), "close")
        assert await busy.closed()
        await drained

    assert [one.outcome for one in Ingress(in_c, engine).run(test)] == ["ok"]


def test_what_a_close_cuts_off_is_counted_as_cancelled(in_c: bool) -> None:
    engine = FakeEngine()

    async def test(at: Ingress) -> None:
        client = await at.client()
        await at.learned(client, post())
        engine.go.clear()
        client.send(post())
        await until(lambda: at.batchers["7"].dispatcher.inflight_rows == 3)
        at.server.close()
        assert await client.closed()

    assert [one.outcome for one in Ingress(in_c, engine).run(test)] == ["cancelled"]


def test_a_connection_ends_when_its_client_says_so(in_c: bool) -> None:
    async def test(at: Ingress) -> None:
        await at.learned(await at.client(), post())
        last = await at.client()
        for _ in range(2 if not at.in_c else 1):
            answer = await at.ask(last, post("Connection: close"))
            assert (scores(answer), answer[1]["connection"]) == (expected(), "close")
            assert await last.closed()
            last = await at.client()

    Ingress(in_c).run(test)


def test_what_is_not_in_binary_form_stays_with_python(in_c: bool) -> None:
    async def test(at: Ingress) -> None:
        client = await at.client()
        for _ in range(3):
            status, _, content = await at.ask(client, post(binary_data_output=False))
            assert (status, json.loads(content)["outputs"][0]["data"]) == (200, expected())
        assert not at.server._express._learned

    Ingress(in_c).run(test)


def test_a_token_is_part_of_what_is_known_and_of_no_use_once_its_file_lacks_it(in_c: bool, tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "tokens"
    token = made(file, caller=["score"])["caller"]
    gate = Gate(str(file), lambda: now)

    async def test(at: Ingress) -> None:
        nonlocal now
        client, asked = await at.client(), post(f"Authorization: Bearer {token}")
        await at.learned(client, asked)
        for wrong in (post(), post(f"Authorization: Bearer {token[:-1]}"), post(f"Authorization: Basic {token}")):
            in_python = at.in_python
            assert scores(await at.ask(client, asked)) == expected()
            assert at.in_python == in_python + (0 if at.in_c else 1)
            assert (await at.ask(await at.client(), wrong))[0] == 401  # the same to the byte, but for the token
        made(file, other=["score"])
        now += 1
        assert (await at.ask(client, post(f"Authorization: Bearer {token}")))[0] == 401

    outcomes = [one.outcome for one in Ingress(in_c, gate=gate).run(test)]
    assert Counter(outcomes) == {"ok": 3, "unauthenticated": 4}
