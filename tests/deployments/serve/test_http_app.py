import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.access.gate import Gate
from deployments.batching.batcher import RowBatcher
from deployments.config import Limits
from deployments.metrics import RequestSeen
from deployments.scoring.catalog import Catalog
from deployments.scoring.served_model import ServedModel
from deployments.serve.http_app import build_app
from dpiframe_core.engine.buckets import BatchSizes
from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import RowBlock
from tests.deployments.direct.direct_app import served
from tests.deployments.serving_doubles import SCHEMA, FakeEngine, columns, until

LIMITS = Limits(max_body_bytes=20_000, max_rows_per_request=100, max_row_dicts=5)
Body = Callable[[httpx.AsyncClient], Awaitable[None]]


class Service:
    """An app over fake engines, and a client of it that needs no socket; or with `direct` one of its direct port.

    `socket_path`: where that is a Unix socket.
    """

    direct = False
    socket_path: Path | None = None

    def __init__(self, *engines: Any, limits: Limits = LIMITS, max_queued_rows: int = 1000, gate: Gate | None = None) -> None:
        self.gate = gate
        self.engines, self.limits, self.max_queued_rows = engines or (FakeEngine(),), limits, max_queued_rows
        self.seen: list[RequestSeen] = []

    def run(self, body: Body) -> None:
        asyncio.run(self._main(body))

    async def _main(self, body: Body) -> None:
        self.batchers = {
            e.manifest.name: RowBatcher(
                e.run_batch, max_batch_rows=e.max_batch_rows, lanes=e.lanes, max_queued_rows=self.max_queued_rows
            )
            for e in self.engines
        }
        self.models = {
            e.manifest.name: ServedModel.of(
                e, self.batchers[e.manifest.name], self.limits, example={"candidates": {"item": [1]}}
            )
            for e in self.engines
        }
        self.app = build_app(Catalog(self.models), self.limits, self.seen.append, self.gate)
        async with contextlib.AsyncExitStack() as stack:
            if self.direct:
                path = self.socket_path
                self.server, port = await stack.enter_async_context(served(self.app, self.limits, path=path))
                transport = None if path is None else httpx.AsyncHTTPTransport(uds=str(path))
                connected = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, transport=transport)
            else:
                connected = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")
            client = await stack.enter_async_context(connected)
            try:
                await body(client)
            finally:
                for engine in self.engines:
                    if isinstance(engine, FakeEngine):
                        engine.go.set()
                for batcher in self.batchers.values():
                    await batcher.close(20)


def request(rows: int = 3, first_item: int = 0, **parts: Any) -> dict[str, Any]:
    return {"context": {"user": 1}, "candidates": columns(rows, first_item), **parts}


def expected(rows: int, first_item: int = 0) -> list[float]:
    return [float(np.float32(first_item + i) / np.float32(1000) + np.float32(0.25)) for i in range(rows)]


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error of an answer, once its form is proven."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert error["code"] == code
    assert error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert "Traceback" not in answer.text
    return error


def test_scores_come_in_the_order_of_the_candidates_with_all_that_the_contract_names() -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/score", json=request(4, 10), headers={"X-Request-ID": "abc 1"})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "abc 1"
        got = answer.json()
        assert set(got) == {"model", "version", "request_id", "scores", "oov_count", "timing_ms"}
        assert (got["model"], got["version"], got["request_id"], got["oov_count"]) == ("fake", "7", "abc 1", 0)
        assert got["scores"] == expected(4, 10)
        assert set(got["timing_ms"]) == {"queue", "encode", "device", "total"}
        assert got["timing_ms"]["device"] == 0.5
        assert got["timing_ms"]["total"] >= got["timing_ms"]["encode"] > 0

    service.run(body)
    [seen] = service.seen
    assert (seen.model, seen.version, seen.outcome, seen.rows, seen.device_ms) == ("fake", "7", "ok", 4, 0.5)
    assert seen.values == 1 + 4 * (1 + 1 + 3)  # user; item, site and three tags of each row
    assert seen.sampled == [[score] for score in expected(4, 10)]


def test_null_is_refused_with_its_path_where_the_schema_does_not_say_what_it_means() -> None:
    engine = FakeEngine()
    kept = {"missing_id": None, "missing_value": None}
    features = tuple(f.model_copy(update={k: v for k, v in kept.items() if k in type(f).model_fields}) for f in SCHEMA.features)
    engine.encoder = Encoder(SCHEMA.model_copy(update={"features": features}), {})

    async def body(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/score", json=request(2))).json()["scores"] == expected(2)
        for name, rule in (("item", "a value"), ("site", "a value"), ("tags", "at least one value"), ("bias", "a number")):
            nulled = columns(2) | {name: [columns(2)[name][0], None]}
            error = refused(await client.post("/v1/score", json=request(candidates=nulled)), 422, "invalid_input")
            assert error["message"].startswith(f"candidates.{name}[1]: got null, expected {rule}, as the schema ")
        error = refused(await client.post("/v1/score", json=request(context={"user": None})), 422, "invalid_input")
        assert error["message"] == "context.user: got null, expected a value, as the schema gives no missing_id for null"

    Service(engine).run(body)
    assert engine.batches == [2]


def test_row_objects_score_the_same() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        names = list(columns(1))
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns(3, 5).values(), strict=True)]
        assert (await client.post("/v1/score", json=request(candidates=rows))).json()["scores"] == expected(3, 5)

    Service().run(body)


def test_several_tasks_answer_a_list_each() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        got = (await client.post("/v1/score", json=request(2, options={"top_k": 1}))).json()
        assert got["scores"]["click"] == expected(2)
        assert got["scores"]["buy"] == [float(np.float32(s) + np.float32(1)) for s in expected(2)]
        assert got["top_k"] == {"indices": [1], "scores": {task: scores[1:] for task, scores in got["scores"].items()}}

    Service(FakeEngine(tasks=("click", "buy"))).run(body)


def test_top_k_gives_the_best_first_and_keeps_the_order_of_equals() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        sent = request(5)
        sent["candidates"] |= {"item": [3, 9, 3, 1, 9]}
        got = (await client.post("/v1/score", json={**sent, "options": {"top_k": 3}})).json()
        assert got["top_k"]["indices"] == [1, 4, 0]
        assert got["top_k"]["scores"] == [got["scores"][i] for i in (1, 4, 0)]
        got = (await client.post("/v1/score", json={**sent, "options": {"top_k": 99}})).json()
        assert got["top_k"]["indices"] == [1, 4, 0, 2, 3]

    Service().run(body)


def test_scores_survive_the_text_form_to_the_last_bit() -> None:
    class Odd(FakeEngine):
        def run_batch(self, blocks: Any) -> Any:
            result = super().run_batch(blocks)
            result.scores[:, 0] = values[: len(result.scores)]
            return result

    rng = np.random.default_rng(0)
    values = np.concatenate([rng.random(40, np.float32), np.float32(10.0) ** np.arange(-38, 0, dtype=np.float32)])

    async def body(client: httpx.AsyncClient) -> None:
        got = (await client.post("/v1/score", json=request(60))).json()
        assert np.array(got["scores"], np.float32).tobytes() == values[:60].tobytes()

    Service(Odd()).run(body)


def direct_port_refuses(value: str) -> bool:
    """Whether the direct port takes a header for none at all."""
    return Service.direct and "\x01" in value


def test_a_request_id_is_kept_if_printable_and_else_replaced() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for sent in ("", "x" * 129, "a\x01b", "é"):
            answer = await client.post("/v1/score", json=request(), headers={"X-Request-ID": sent.encode("latin-1")})  # type: ignore[dict-item]
            assert answer.status_code == (400 if direct_port_refuses(sent) else 200)
            assert len(answer.headers["x-request-id"]) == 16
        for sent in ("x" * 128, "~ok!"):
            answer = await client.post("/v1/score", content=b"", headers={"X-Request-ID": sent})
            assert refused(answer, 400, "not_json")["request_id"] == sent

    Service().run(body)


@pytest.mark.parametrize(
    ("change", "status", "code", "where", "message"),
    [
        ({"candidates": {"item": [1]}}, 422, "invalid_input", "candidates.site", "expected the feature"),
        ({"candidates": {"item": ["1"]}}, 422, "invalid_input", "candidates.item[0]", "got '1', expected an integer or null"),
        ({"candidates": {**columns(2), "item": [1]}}, 422, "invalid_input", "candidates.site", "got 2, expected 1 values"),
        ({"candidates": {**columns(2), "item": [1, 1000]}}, 422, "invalid_input", "candidates.item[1]", "got 1000, expected"),
        ({"candidates": {**columns(1), "item": [2**70]}}, 422, "invalid_input", "candidates.item[0]", "an integer of 64 bits"),
        ({"candidates": {**columns(1), "price": [10**400]}}, 422, "invalid_input", "candidates.price[0]", "a finite number"),
        ({"candidates": {**columns(1), "bias": [1e300]}}, 422, "invalid_input", "candidates.bias[0]", "got 1e+300, expected"),
        ({"candidates": {**columns(1), "tags": [["a"] * 4]}}, 422, "invalid_input", "candidates.tags[0]", "at most 3 values"),
        ({"candidates": columns(101)}, 413, "too_large", "candidates.item", "got a list of 101 values, expected at most 100"),
        ({"candidates": [{}] * 6}, 413, "too_large", "candidates", "got a list of 6 values, expected at most 5"),
        ({"context": {}}, 422, "invalid_input", "context.user", "expected the feature"),
        ({"context": {"user": 1, "item": 2}}, 422, "invalid_input", "context.item", "got 2, expected"),
        ({"context": {"user": -1}}, 422, "invalid_input", "context.user", "got -1, expected an id"),
        ({"model": "other"}, 404, "model_not_found", "model", "got 'other', expected one of ['fake']"),
        ({"version": "8"}, 404, "model_not_found", "version", "got '8', expected '7'"),
        ({"model": "other", "candidates": {"x": 1}}, 404, "model_not_found", "model", "got 'other'"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_with_path_and_rule(
    change: Mapping[str, Any], status: int, code: str, where: str, message: str
) -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        sent = json.dumps({**request(), **change})
        error = refused(await client.post("/v1/score", content=sent), status, code)
        assert error["where"] == where
        assert message in error["message"]
        assert error["message"] == f"{where}: got {error['got']}, expected {error['expected']}"

    service.run(body)
    assert service.engines[0].batches == []
    assert [seen.outcome for seen in service.seen] == [code]


def test_a_bad_request_does_not_touch_its_neighbours_in_the_same_batch() -> None:
    """While the lane is busy, good and bad requests arrive in turn; the good ones share one batch and all score right."""
    engine = FakeEngine()
    engine.go.clear()
    bad: list[dict[str, Any]] = [
        {"candidates": {**columns(2), "item": [1, 5000]}},
        {"candidates": {**columns(2), "bias": [0, 3.0e38 * 10]}},
        {"candidates": {"nonsense": 1}},
    ]
    service = Service(engine)

    async def body(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/v1/score", json=request(1)))
        await until(lambda: engine.batches == [1])
        tasks = []
        for i, change in enumerate(bad):
            tasks.append(asyncio.create_task(client.post("/v1/score", json=request(3, 10 * i))))
            tasks.append(asyncio.create_task(client.post("/v1/score", content=json.dumps(request(**change)))))
        await until(lambda: len(service.seen) == 3 and service.batchers["fake"].dispatcher.queued_rows == 9)
        engine.go.set()
        answers = await asyncio.gather(first, *tasks)
        assert answers[0].json()["scores"] == expected(1)
        for i, (good, ill) in enumerate(zip(answers[1::2], answers[2::2], strict=True)):
            assert good.json()["scores"] == expected(3, 10 * i)
            refused(ill, 422, "invalid_input")

    service.run(body)
    assert engine.batches == [1, 9]


def test_a_score_that_overflows_is_the_requests_fault_and_its_neighbours_stand() -> None:
    class Squaring(FakeEngine):
        def run_batch(self, blocks: Any) -> Any:
            result = super().run_batch(blocks)
            with np.errstate(over="ignore"):
                result.scores[:] *= result.scores
            return result

    engine = Squaring()
    engine.go.clear()
    service = Service(engine)

    async def body(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/v1/score", json=request(1)))
        await until(lambda: engine.batches == [1])
        over = request(2)
        over["candidates"] |= {"bias": [0.0, 3.4e38]}
        tasks = [asyncio.create_task(client.post("/v1/score", json=sent)) for sent in (request(2), over)]
        await until(lambda: service.batchers["fake"].dispatcher.queued_rows == 4)
        engine.go.set()
        good, ill = await asyncio.gather(*tasks)
        await first
        assert good.json()["scores"] == [float(np.float32(s) ** 2) for s in expected(2)]
        error = refused(ill, 422, "invalid_input")
        assert error["message"] == "candidates[1]: got inf, expected feature values for which the score is finite"

    service.run(body)
    assert engine.batches == [1, 4]


@pytest.fixture
def encoded_on_loop(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """For each encoding that takes place: whether it is done by the thread of the event loop."""
    import threading

    seen: set[bool] = set()
    encode = Encoder.encode

    def spy(self: Encoder, *args: Any) -> RowBlock:
        seen.add(threading.current_thread() is threading.main_thread())
        return encode(self, *args)

    monkeypatch.setattr(Encoder, "encode", spy)
    return seen


def test_large_columns_are_encoded_off_the_loop_with_the_same_result(encoded_on_loop: set[bool]) -> None:
    limits = Limits(max_rows_per_request=20_000)

    async def body(client: httpx.AsyncClient) -> None:
        rows = 15_000
        sent = {**columns(rows), "item": [i % 1000 for i in range(rows)]}
        got = (await client.post("/v1/score", json=request(candidates=sent))).json()
        assert got["scores"] == [expected(1, i % 1000)[0] for i in range(rows)]

    Service(limits=limits, max_queued_rows=20_000).run(body)
    assert encoded_on_loop == {False}


def test_one_very_long_list_of_a_multi_valued_feature_is_encoded_off_the_loop_too(encoded_on_loop: set[bool]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        sent = {**columns(1), "tags": [["x"] * 250_000]}
        error = refused(await client.post("/v1/score", json=request(candidates=sent)), 422, "invalid_input")
        assert error["message"] == "candidates.tags[0]: got 250000, expected at most 3 values"

    Service(limits=Limits()).run(body)
    assert encoded_on_loop == {False}


def test_a_full_queue_answers_429_with_whole_and_precise_seconds() -> None:
    engine = FakeEngine()
    engine.go.clear()
    service = Service(engine, max_queued_rows=10)

    async def body(client: httpx.AsyncClient) -> None:
        kept = [asyncio.create_task(client.post("/v1/score", json=request(8)))]
        await until(lambda: engine.batches == [8])
        kept.append(asyncio.create_task(client.post("/v1/score", json=request(8))))
        await until(lambda: service.batchers["fake"].dispatcher.queued_rows == 8)
        answer = await client.post("/v1/score", json=request(8))
        error = refused(answer, 429, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert 0 < error["retry_after_s"] <= 1
        assert 0 <= int(answer.headers["retry-after-ms"]) / 1e3 - error["retry_after_s"] < 0.00101
        engine.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*kept)] == [200, 200]

    service.run(body)


@pytest.mark.parametrize("limits", [LIMITS, LIMITS.model_copy(update={"default_deadline_ms": 20.0})])
def test_a_deadline_of_the_request_or_of_the_deployment_answers_504(limits: Limits) -> None:
    engine = FakeEngine()
    engine.go.clear()
    service = Service(engine, limits=limits)

    async def body(client: httpx.AsyncClient) -> None:
        options = {} if limits.default_deadline_ms else {"deadline_ms": 20}
        error = refused(await client.post("/v1/score", json=request(options=options)), 504, "deadline_exceeded")
        assert error["message"].startswith("deadline: got past it ")
        assert "where" not in error

    service.run(body)


def test_a_device_fault_answers_503_and_the_next_request_is_served(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()

    async def body(client: httpx.AsyncClient) -> None:
        engine.fault = RuntimeError("secret detail")
        answer = await client.post("/v1/score", json=request())
        refused(answer, 503, "unavailable")
        assert "secret" not in answer.text
        engine.fault = None
        assert (await client.post("/v1/score", json=request())).status_code == 200

    Service(engine).run(body)
    assert "secret detail" in caplog.text


def test_a_fault_of_ours_answers_500_with_the_id_under_which_it_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> RowBlock:
        raise KeyError("secret detail")

    monkeypatch.setattr(Encoder, "encode", broken)

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/score", json=request(), headers={"X-Request-ID": "find-me"})
        error = refused(answer, 500, "internal")
        assert "find-me" in error["message"]
        assert "secret" not in answer.text

    with caplog.at_level(logging.ERROR):
        Service().run(body)
    assert "find-me" in caplog.text
    assert "secret detail" in caplog.text


def test_with_several_models_a_request_must_name_one_and_reaches_that_one() -> None:
    one, two = FakeEngine(name="one"), FakeEngine(name="two", version="2")

    async def body(client: httpx.AsyncClient) -> None:
        got = (await client.post("/v1/score", json=request(model="two"))).json()
        assert (got["model"], got["version"]) == ("two", "2")
        assert (one.batches, two.batches) == ([], [3])
        assert (await client.post("/v1/score", json=request(model="one", version="7"))).status_code == 200
        error = refused(await client.post("/v1/score", json=request()), 422, "invalid_input")
        assert error["message"] == "model: got nothing, expected one of ['one', 'two']"
        refused(await client.post("/v1/score", json=request(model="one", version="2")), 404, "model_not_found")
        refused(await client.post("/v1/score", json=request(model=5)), 422, "invalid_input")
        refused(await client.post("/v1/score", content=b"{"), 400, "not_json")

    Service(one, two).run(body)


def test_replacing_a_model_in_the_mapping_reaches_the_next_request() -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        new = ServedModel.of(FakeEngine(version="8"), service.batchers["fake"], LIMITS)
        service.models["fake"] = new
        assert (await client.post("/v1/score", json=request())).json()["version"] == "8"

    service.run(body)


def test_the_models_are_listed_with_their_features_tables_and_device() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        [model] = (await client.get("/v1/models")).json()["models"]
        assert (model["name"], model["version"], model["device"], model["precision"]) == ("fake", "7", "cpu", "fp32")
        assert model["architecture"]["type"] == "deepfm"
        assert model["tasks"] == ["click"]
        features = {f["name"]: f for f in model["features"]}
        assert list(features) == [f.name for f in SCHEMA.features]
        assert (features["user"]["scope"], features["user"]["encoder"]["type"]) == ("context", "identity")
        assert features["price"]["transforms"][0]["type"] == "log"
        assert {t["name"]: t["rows"] for t in model["tables"]} == {"users": 1000, "items": 1000, "sites": 100}

    Service().run(body)


def test_the_sizes_of_batches_are_told_as_tune_reads_them() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for rows in (3, 3, 50):
            await client.post("/v1/score", json=request(rows))
        answer = await client.get("/v1/batch-sizes")
        assert answer.json() == {
            "model": "fake", "version": "7", "max_batch_rows": 64, "counts": {"3": 2, "50": 1}, "buckets": [8, 64],
            "padding_waste": pytest.approx((5 + 5 + 14) / (8 + 8 + 64)),
        }  # fmt: skip
        assert BatchSizes.model_validate_json(answer.content, strict=True).counts == {3: 2, 50: 1}
        assert (await client.get("/v1/batch-sizes?model=fake")).json() == answer.json()
        error = refused(await client.get("/v1/batch-sizes?model=other"), 404, "model_not_found")
        assert error["message"] == "model: got 'other', expected one of ['fake']"

    Service().run(body)


def test_of_several_models_one_must_be_named_for_its_batch_sizes() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        error = refused(await client.get("/v1/batch-sizes"), 422, "invalid_input")
        assert error["message"] == "model: got nothing, expected one of ['one', 'two']"
        assert (await client.get("/v1/batch-sizes?model=two")).json()["counts"] == {}
        route = (await client.get("/openapi.json")).json()["paths"]["/v1/batch-sizes"]["get"]
        assert set(route["responses"]) == {"200", "404", "422"}

    Service(FakeEngine(name="one"), FakeEngine(name="two")).run(body)


def test_ready_follows_the_batchers_and_live_does_not() -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        assert (await client.get("/readyz")).json() == {"status": "ready"}
        await service.batchers["fake"].close(1)
        refused(await client.get("/readyz"), 503, "unavailable")
        assert (await client.get("/livez")).json() == {"status": "live"}
        refused(await client.post("/v1/score", json=request()), 503, "unavailable")

    service.run(body)


def test_unknown_paths_and_methods_are_answered_in_the_same_form() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        error = refused(await client.get("/nowhere", headers={"X-Request-ID": "here"}), 404, "not_found")
        assert error["message"] == "route: got GET '/nowhere', expected one of this server (see /docs)"
        refused(await client.post("/v1/score/", json=request()), 404, "not_found")
        answer = await client.get("/v1/score")
        error = refused(answer, 405, "method_not_allowed")
        assert error["message"] == "route: got GET '/v1/score', expected one of this server (see /docs)"
        assert answer.headers["allow"] == "POST"
        refused(await client.request("OPTIONS", "/v1/score"), 405, "method_not_allowed")
        refused(await client.post("/livez"), 405, "method_not_allowed")
        for path in ("/%ff%00\u00e9", "/" + "a" * 9000):
            assert len(refused(await client.get(path), 404, "not_found")["message"]) < 200
        refused(await client.get("/nowhere", headers={"Host": "["}), 404, "not_found")

    Service().run(body)


def test_the_documentation_shows_the_score_route_with_the_models_own_features() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        route = document["paths"]["/v1/score"]["post"]
        content = route["requestBody"]["content"]["application/json"]
        assert set(document["components"]["schemas"]) >= {"ScoreRequest_one", "ScoreRequest_two", "ScoreAnswer", "ErrorAnswer"}
        *each, several = content["schema"]["anyOf"]
        assert [ref["$ref"] for ref in each] == [
            "#/components/schemas/ScoreRequest_one",
            "#/components/schemas/ScoreRequest_two",
        ]
        assert (several["type"], several["items"]["anyOf"]) == ("array", each)
        assert content["examples"]["one"]["value"] == {"candidates": {"item": [1]}}
        assert set(route["responses"]) == {"200", *map(str, (400, 401, 403, 404, 408, 413, 415, 422, 429, 503, 504))}
        for ref in _references(document):
            assert ref.removeprefix("#/components/schemas/") in document["components"]["schemas"]
        told = [tag["name"] for tag in document["tags"]]
        assert told[:2] == ["score", "protocol"]
        assert {tag for path in document["paths"].values() for route in path.values() for tag in route["tags"]} <= set(told)
        assert (await client.get("/docs")).status_code == 200

    Service(FakeEngine(name="one"), FakeEngine(name="two")).run(body)


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [v for k, v in node.items() if k == "$ref"] + [r for v in node.values() for r in _references(v)]
    return [r for v in node for r in _references(v)] if isinstance(node, list) else []


def test_a_model_must_be_found_before_it_is_served() -> None:
    with pytest.raises(InputError, match=r"model: got nothing, expected one of \[\]"):
        Catalog().find(None, None)
