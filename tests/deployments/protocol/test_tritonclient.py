"""The protocol as its best known client speaks it: `tritonclient`, unchanged, over REST and gRPC, sync and async."""

import asyncio
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from deployments.batching.batcher import RowBatcher
from tests.deployments.live_app import LiveApp, wait_until
from tests.deployments.serving_doubles import FakeEngine

http = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
rpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
http_aio = pytest.importorskip("tritonclient.http.aio")
rpc_aio = pytest.importorskip("tritonclient.grpc.aio")
errors = pytest.importorskip("tritonclient.utils")
gevent = pytest.importorskip("gevent")  # of tritonclient.http

ROWS = 4


@pytest.fixture(scope="module")
def live() -> Iterator[LiveApp]:
    with LiveApp(FakeEngine(), FakeEngine(("click", "buy"), "two", "3")) as app:
        yield app


@pytest.fixture
def rest(live: LiveApp) -> Iterator[Any]:
    with http.InferenceServerClient(live.address) as client:
        yield client


@pytest.fixture
def grpc_client(live: LiveApp) -> Iterator[Any]:
    with rpc.InferenceServerClient(live.grpc_address) as client:
        yield client


def tensor(kind: Any, name: str, values: np.ndarray[Any, Any], **how: Any) -> Any:
    made = kind.InferInput(name, list(values.shape), errors.np_to_triton_dtype(values.dtype))
    made.set_data_from_numpy(values, **how)
    return made


def raw(kind: Any, rows: int = ROWS, first: int = 0, **how: Any) -> list[Any]:
    """The user is shared: one row for all candidates."""
    sites = np.array([f"s{i}é".encode() for i in range(rows)], object)
    return [
        tensor(kind, "user", np.array([7], np.int64), **how),
        tensor(kind, "item", np.arange(first, first + rows, dtype=np.int64), **how),
        tensor(kind, "site", sites, **how),
        tensor(kind, "tags", np.array([[b"x", b"y"]] * rows, object), **how),
        tensor(kind, "price", np.full(rows, 1.5, np.float32), **how),
        tensor(kind, "bias", np.full(rows, 0.25, np.float32), **how),
    ]


def sections(kind: Any, rows: int = ROWS, dtype: type = np.int32, **how: Any) -> list[Any]:
    ids = np.zeros((rows, 5), dtype)
    ids[:, 0] = np.arange(rows)
    ids[:, 3:] = -1
    return [
        tensor(kind, "context_ids", np.array([[7]], dtype), **how),
        tensor(kind, "candidate_ids", ids, **how),
        tensor(kind, "candidate_dense", np.array([[1.0, 0.25]] * rows, np.float32), **how),
    ]


def by_feature(kind: Any, rows: int = ROWS, **how: Any) -> list[Any]:
    return [
        tensor(kind, "user", np.array([7], np.int32), **how),
        tensor(kind, "item", np.arange(rows, dtype=np.int64), **how),
        tensor(kind, "site", np.full((rows, 1), 5, np.int32), **how),
        tensor(kind, "tags", np.array([[2, -1]] * rows, np.int32), **how),
        tensor(kind, "price", np.full(rows, 1.5, np.float32), **how),
        tensor(kind, "bias", np.full(rows, 0.25, np.float32), **how),
    ]


def wanted(rows: int = ROWS, first: int = 0, tasks: int = 1) -> np.ndarray[Any, Any]:
    items = np.arange(first, first + rows, dtype=np.float32) / np.float32(1000) + np.float32(0.25)
    return np.stack([items + np.float32(t) for t in range(tasks)], axis=1)


def assert_scores(result: Any, rows: int = ROWS, first: int = 0, tasks: int = 1) -> None:
    assert np.array_equal(result.as_numpy("scores"), wanted(rows, first, tasks))


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("answer_binary", [True, False, None], ids=["to-binary", "to-json", "to-default"])
def test_raw_values_over_rest(rest: Any, binary: bool, answer_binary: bool | None) -> None:
    outputs = None if answer_binary is None else [http.InferRequestedOutput("scores", binary_data=answer_binary)]
    result = rest.infer("fake", raw(http, binary_data=binary), outputs=outputs, request_id="abc")
    assert_scores(result)
    answer = result.get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("fake", "7", "abc")
    assert ("data" in answer["outputs"][0]) == (answer_binary is False)
    assert answer["parameters"]["oov_count"] == 0


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_encoded_values_over_rest(rest: Any, binary: bool) -> None:
    assert_scores(rest.infer("fake", sections(http, binary_data=binary)))
    assert_scores(rest.infer("fake", sections(http, dtype=np.int64, binary_data=binary), model_version="7"))
    assert_scores(rest.infer("fake", by_feature(http, binary_data=binary), parameters={"encoded": True}))


@pytest.mark.parametrize("how", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_compressed_bodies_over_rest(rest: Any, how: str, binary: bool) -> None:
    inputs = raw(http, 50, binary_data=binary)
    result = rest.infer("fake", inputs, request_compression_algorithm=how, response_compression_algorithm=how)
    assert_scores(result, 50)


def test_raw_and_encoded_values_over_grpc(grpc_client: Any) -> None:
    result = grpc_client.infer("fake", raw(rpc), request_id="abc")
    assert_scores(result)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("fake", "7", "abc")
    assert response.parameters["oov_count"].int64_param == 0
    assert response.parameters["device_ms"].double_param == 0.5
    assert_scores(grpc_client.infer("fake", sections(rpc)))
    assert_scores(grpc_client.infer("fake", by_feature(rpc), parameters={"encoded": True}, priority=2, timeout=5_000_000))


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_compressed_messages_over_grpc(grpc_client: Any, how: str) -> None:
    assert_scores(grpc_client.infer("fake", raw(rpc, 50), compression_algorithm=how), 50)


def test_async_infer_of_the_sync_clients(live: LiveApp, grpc_client: Any) -> None:
    with http.InferenceServerClient(live.address, concurrency=4) as client:
        waiting = [client.async_infer("fake", raw(http, 3, i)) for i in range(8)]
        for i, handle in enumerate(waiting):
            assert_scores(handle.get_result(), 3, i)
    done: SimpleQueue[Any] = SimpleQueue()
    for _ in range(4):
        grpc_client.async_infer("fake", raw(rpc, 3, 5), callback=lambda result, error: done.put((result, error)))
    for _ in range(4):
        result, error = done.get(timeout=30)
        assert error is None
        assert_scores(result, 3, 5)


def test_the_asyncio_clients(live: LiveApp) -> None:
    async def main() -> None:
        async with http_aio.InferenceServerClient(live.address) as client:
            results = await asyncio.gather(*(client.infer("two", raw(http, 3, i)) for i in range(8)))
            for i, result in enumerate(results):
                assert_scores(result, 3, i, tasks=2)
            assert await client.is_server_ready()
            packed = await client.infer("fake", sections(http), request_compression_algorithm="gzip")
            assert_scores(packed)
        async with rpc_aio.InferenceServerClient(live.grpc_address) as client:
            results = await asyncio.gather(*(client.infer("two", raw(rpc, 3, i)) for i in range(8)))
            for i, result in enumerate(results):
                assert_scores(result, 3, i, tasks=2)
            assert await client.is_model_ready("two", "3")

    asyncio.run(main())


@pytest.mark.parametrize("which", ["rest", "grpc_client"])
def test_health_metadata_and_index(which: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(which)
    how = {} if which == "rest" else {"as_json": True}
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fake")
    assert client.is_model_ready("fake", "7")
    assert not client.is_model_ready("fake", "8")
    assert not client.is_model_ready("none")
    server = client.get_server_metadata(**how)
    assert server["name"] == "dpiframe"
    assert "binary_tensor_data" in server["extensions"]
    model = client.get_model_metadata("two", "3", **how)
    assert (model["name"], model["versions"], model["platform"]) == ("two", ["3"], "dpiframe")
    inputs = {i["name"]: (i["datatype"], [int(n) for n in i["shape"]]) for i in model["inputs"]}
    assert inputs == {
        "user": ("INT64", [-1]), "item": ("INT64", [-1]), "site": ("BYTES", [-1]), "tags": ("BYTES", [-1, -1]),
        "price": ("FP32", [-1]), "bias": ("FP32", [-1]),
    }  # fmt: skip
    [output] = model["outputs"]
    assert (output["name"], output["datatype"], [int(n) for n in output["shape"]]) == ("scores", "FP32", [-1, 2])
    config = client.get_model_config("two", **how)
    config = config if which == "rest" else config["config"]
    assert (config["name"], config["platform"], int(config.get("max_batch_size", 0))) == ("two", "dpiframe", 0)
    types = {i["name"]: (i["data_type"], [int(n) for n in i["dims"]]) for i in config["input"]}
    triton = {"INT64": "TYPE_INT64", "BYTES": "TYPE_STRING", "FP32": "TYPE_FP32"}
    assert types == {name: (triton[datatype], shape) for name, (datatype, shape) in inputs.items()}
    [output] = config["output"]
    assert (output["name"], output["data_type"], [int(n) for n in output["dims"]]) == ("scores", "TYPE_FP32", [-1, 2])
    index = client.get_model_repository_index(**how)
    index = index if which == "rest" else index["models"]
    assert [(m["name"], m["version"], m["state"]) for m in index] == [("fake", "7", "READY"), ("two", "3", "READY")]


@pytest.mark.parametrize("which", ["rest", "grpc_client"])
def test_statistics_count_requests_rows_and_runs(which: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(which)
    kind, how = (http, {}) if which == "rest" else (rpc, {"as_json": True})

    def stats() -> dict[str, Any]:
        [one] = client.get_inference_statistics("fake", **how)["model_stats"]
        return one

    client.infer("fake", raw(kind))  # alone the test would find that nothing was counted, which gRPC's messages leave out
    before = stats()
    client.infer("fake", raw(kind, 9))
    with pytest.raises(errors.InferenceServerException):
        client.infer("fake", raw(kind)[1:])
    after = stats()
    grown = {name: int(after[name]) - int(before[name]) for name in ("inference_count", "execution_count")}
    assert grown == {"inference_count": 9, "execution_count": 1}
    assert int(after["last_inference"]) >= int(before["last_inference"]) > 1.6e12

    def count(of: dict[str, Any], what: str) -> int:
        return int(of["inference_stats"][what].get("count", 0))

    assert count(after, "success") - count(before, "success") == 1
    assert count(after, "fail") - count(before, "fail") == 1

    def spent_ns(of: dict[str, Any], what: str) -> int:
        return int(of["inference_stats"][what].get("ns", 0))  # as JSON, gRPC's messages leave out what is 0

    assert spent_ns(after, "compute_infer") - spent_ns(before, "compute_infer") == 500_000
    steps = ("queue", "compute_input", "compute_infer", "compute_output")
    assert {count(after, step) for step in steps} == {count(after, "success")}  # else perf_analyzer gives up
    parts = sum(spent_ns(after, step) for step in steps)
    # nothing of a request's time is left out; the double's device says 0.5 ms whatever it took
    assert parts >= spent_ns(after, "success") - 10
    assert {m["name"] for m in client.get_inference_statistics(**how)["model_stats"]} == {"fake", "two"}


REFUSED = [
    ("none", {}, "model: got 'none', expected one of ['fake', 'two']"),
    ("fake", {"model_version": "8"}, "version: got '8', expected '7', the version of 'fake' served here"),
    ("fake", {"outputs": ["click"]}, "outputs: got 'click', expected scores"),
    ("fake", {"parameters": {"deadline": 5}}, "parameters.deadline: got an unknown key, expected one of"),
    ("fake", {"sequence_id": 5}, "parameters.sequence_"),
    ("fake", {"parameters": {"deadline_ms": -1.0}}, "parameters.deadline_ms: got -1.0, expected greater than 0"),
    ("fake", {"priority": 11}, "parameters.priority: got 11, expected less than or equal to 10"),
]


@pytest.mark.parametrize("which", ["rest", "grpc_client"])
@pytest.mark.parametrize(("model", "how", "message"), REFUSED)
def test_refusals_have_the_protocols_form(
    which: str, model: str, how: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    client, kind = request.getfixturevalue(which), http if which == "rest" else rpc
    given = {k: [kind.InferRequestedOutput(name) for name in v] if k == "outputs" else v for k, v in how.items()}
    with pytest.raises(errors.InferenceServerException) as caught:
        client.infer(model, raw(kind), **given)
    assert caught.value.message().startswith(message)
    status, code = ("404", "NOT_FOUND") if message.startswith(("model", "version")) else ("422", "INVALID_ARGUMENT")
    assert caught.value.status() == (status if which == "rest" else f"StatusCode.{code}")
    assert_scores(client.infer("fake", raw(kind)))


TENSORS = [
    (lambda kind: raw(kind)[1:], "context.user: got nothing, expected the feature: of every candidate"),
    (lambda kind: [*raw(kind), tensor(kind, "colour", np.zeros(ROWS, np.int64))], "inputs: got 'colour', expected a feature"),
    (lambda kind: [*raw(kind), raw(kind)[1]], "inputs: got 'item', expected each name once"),
    (lambda kind: [*raw(kind)[:-1], tensor(kind, "bias", np.zeros(ROWS - 1, np.float32))],
     "candidates.bias: got 3, expected 4 values, as many as candidates.item"),
    (lambda kind: [*raw(kind)[:-1], tensor(kind, "bias", np.array([0, 1, np.nan, 2], np.float32))],
     "candidates.bias[2]: got nan, expected a finite number or null"),
    (lambda kind: [*raw(kind)[:1], tensor(kind, "item", np.array([1, 2, 1000, 4])), *raw(kind)[2:]],
     "candidates.item[2]: got 1000, expected an id from 0 to 999"),
    (lambda kind: [*raw(kind)[:1], tensor(kind, "item", np.array([b"a", b"b", b"c", b"d"], object)), *raw(kind)[2:]],
     "candidates.item[0]: got 'a', expected an integer"),
    (lambda kind: [*raw(kind)[:2], tensor(kind, "site", np.array([b"a", b"\xff", b"c", b"d"], object)), *raw(kind)[3:]],
     "inputs.site[1]: got b'\\xff', expected text in UTF-8"),
    (lambda kind: sections(kind)[:2], "candidate_dense: got null, expected shape [n, 2]"),
    (lambda kind: [*sections(kind), raw(kind)[1]], "inputs: got 'item', expected one of context_ids, candidate_ids"),
    (lambda kind: [sections(kind)[0], tensor(kind, "candidate_ids", np.full((ROWS, 5), 99, np.int32)), sections(kind)[2]],
     None),
    (lambda kind: [sections(kind)[0], tensor(kind, "candidate_ids", np.full((ROWS, 5), 100, np.int32)), sections(kind)[2]],
     "candidate_ids[0, 1]: got 100, expected an id of site from 0 to 99"),
    (lambda kind: [sections(kind)[0], tensor(kind, "candidate_ids", np.full((ROWS, 5), -1, np.int32)), sections(kind)[2]],
     "candidate_ids[0, 0]: got -1, expected an id of item from 0 to 999"),
    (lambda kind: [tensor(kind, "context_ids", np.zeros((3, 1), np.int64)), *sections(kind)[1:]],
     "context_ids: got 3, expected one row for all candidates, or 4"),
]  # fmt: skip


@pytest.mark.parametrize("which", ["rest", "grpc_client"])
@pytest.mark.parametrize(("make", "message"), TENSORS)
def test_a_wrong_tensor_is_named_with_the_rule(
    which: str, make: Any, message: str | None, request: pytest.FixtureRequest
) -> None:
    client, kind = request.getfixturevalue(which), http if which == "rest" else rpc
    if message is None:
        client.infer("fake", make(kind))
        return
    with pytest.raises(errors.InferenceServerException) as caught:
        client.infer("fake", make(kind))
    assert caught.value.message().startswith(message)
    assert caught.value.status() == ("422" if which == "rest" else "StatusCode.INVALID_ARGUMENT")


def until_sent(true: Callable[[], bool]) -> None:
    """`async_infer` gives its greenlet 10 ms, too few on a busy host; then it goes on only while this thread sleeps so."""

    def looked() -> bool:
        gevent.sleep(0.001)
        return true()

    wait_until(looked)


def test_a_full_queue_and_a_passed_deadline_have_their_statuses() -> None:
    engine = FakeEngine()
    engine.go.clear()
    with LiveApp(engine, max_queued_rows=500) as live, http.InferenceServerClient(live.address, concurrency=4) as client:
        batcher: RowBatcher = live.batchers["fake"]
        waiting = [client.async_infer("fake", raw(http, 64))]
        until_sent(lambda: batcher.dispatcher.inflight_rows == 64)
        waiting.append(client.async_infer("fake", raw(http, 400)))
        until_sent(lambda: batcher.dispatcher.queued_rows == 400)
        with rpc.InferenceServerClient(live.grpc_address) as other:
            for one, kind, status in ((client, http, "429"), (other, rpc, "StatusCode.RESOURCE_EXHAUSTED")):
                with pytest.raises(errors.InferenceServerException, match="queue: got 400 rows waiting") as caught:
                    one.infer("fake", raw(kind, 200))
                assert caught.value.status() == status
            for one, kind, status in ((client, http, "504"), (other, rpc, "StatusCode.DEADLINE_EXCEEDED")):
                with pytest.raises(errors.InferenceServerException, match="deadline: got past it ") as caught:
                    one.infer("fake", raw(kind, 4), timeout=200_000)
                assert caught.value.status() == status
        engine.go.set()
        for handle, rows in zip(waiting, (64, 400), strict=True):
            assert_scores(handle.get_result(), rows)
