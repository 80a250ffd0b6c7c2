"""The protocol over REST, by bytes: what its clients never send. Every fault is a 4xx in the protocol's form."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.client.columns import encoded_texts
from deployments.config import Limits
from tests.deployments.http_api.test_rude_clients import call
from tests.deployments.serve.test_http_app import Service, request
from tests.deployments.serving_doubles import FakeEngine, until

LIMITS = Limits(max_body_bytes=20_000, max_rows_per_request=100)
INFER = "/v2/models/fake/infer"
Body = Callable[[httpx.AsyncClient], Awaitable[None]]


def run(body: Body, *engines: FakeEngine, **how: Any) -> Service:
    service = Service(*engines, limits=LIMITS, **how)
    service.run(body)
    return service


def tensors(rows: int = 2, first: int = 0) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        "user": ("INT64", [1], np.int64([7]).tobytes()),
        "item": ("INT64", [rows], np.arange(first, first + rows).tobytes()),
        "site": ("BYTES", [rows], encoded_texts([b"ab"] * rows)),
        "tags": ("BYTES", [rows, 2], encoded_texts([b"x", b"y"] * rows)),
        "price": ("FP32", [rows], np.ones(rows, np.float32).tobytes()),
        "bias": ("FP32", [rows, 1], np.full(rows, 0.25, np.float32).tobytes()),
    }


def packed(given: dict[str, tuple[str, list[int], bytes]], **envelope: Any) -> tuple[bytes, dict[str, str]]:
    """A body in binary form, and its header."""
    inputs = [
        {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, (kind, shape, data) in given.items()
    ]
    header = json.dumps({"inputs": inputs, **envelope}).encode()
    return header + b"".join(data for *_, data in given.values()), {"Inference-Header-Content-Length": str(len(header))}


def listed(rows: int = 2, **changed: Any) -> dict[str, Any]:
    """A request in JSON; `changed` by input's name: its new keys, or None to leave it out."""
    data: dict[str, Any] = {
        "user": {"datatype": "INT64", "shape": [1], "data": [7]},
        "item": {"datatype": "INT64", "shape": [rows], "data": list(range(rows))},
        "site": {"datatype": "BYTES", "shape": [rows], "data": ["ab"] * rows},
        "tags": {"datatype": "BYTES", "shape": [rows, 2], "data": [["x", "y"]] * rows},
        "price": {"datatype": "FP32", "shape": [rows], "data": [1] * rows},
        "bias": {"datatype": "FP64", "shape": [rows], "data": [0.25] * rows},
    }
    for name, keys in changed.items():
        if keys is None:
            del data[name]
        else:
            data[name] = data.get(name, {}) | keys
    return {"inputs": [{"name": name, **keys} for name, keys in data.items()]}


def bags(values: int, lengths: list[int]) -> dict[str, Any]:
    return listed(
        tags={"shape": [values], "data": ["x"] * values},
        **{"tags:lengths": {"datatype": "INT64", "shape": [len(lengths)], "data": lengths}},
    )


def expected(rows: int = 2, first: int = 0) -> list[float]:
    return [float(np.float32(first + i) / np.float32(1000) + np.float32(0.25)) for i in range(rows)]


def scores(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    length = answer.headers.get("inference-header-content-length")
    if length is None:
        [output] = answer.json()["outputs"]
        return [float(np.float32(value)) for value in output["data"]]
    [output] = json.loads(answer.content[: int(length)])["outputs"]
    raw = answer.content[int(length) :]
    assert output["parameters"]["binary_data_size"] == len(raw)
    return np.frombuffer(raw, np.float32).tolist()


def refused(answer: httpx.Response, status: int, message: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert set(answer.json()) == {"error"}
    assert answer.json()["error"].startswith(message), answer.json()["error"]


def test_binary_and_json_score_alike_and_answers_come_as_asked() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        content, headers = packed(tensors(3, 5))
        answer = await client.post(INFER, content=content, headers=headers)
        assert answer.json()["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [3, 1], "data": expected(3, 5)}]
        content, headers = packed(tensors(3, 5), parameters={"binary_data_output": True}, id="abc")
        answer = await client.post(INFER, content=content, headers=headers | {"X-Request-ID": "r 1"})
        assert scores(answer) == expected(3, 5)
        assert (answer.headers["content-type"], answer.headers["x-request-id"]) == ("application/octet-stream", "r 1")
        output = {"name": "scores", "parameters": {"binary_data": False}}
        content, headers = packed(tensors(3, 5), parameters={"binary_data_output": True}, outputs=[output])
        assert scores(await client.post("/v2/models/fake/versions/7/infer", content=content, headers=headers)) == expected(3, 5)
        answer = await client.post(INFER, json=listed(3))
        assert scores(answer) == expected(3)
        assert set(answer.json()) == {"model_name", "model_version", "parameters", "outputs"}
        assert set(answer.json()["parameters"]) == {"oov_count", "queue_ms", "encode_ms", "device_ms"}

    service = run(body)
    assert [(seen.model, seen.outcome, seen.rows) for seen in service.seen] == [("fake", "ok", 3)] * 4


@pytest.mark.parametrize(
    "changed",
    [
        {"user": {"shape": [2], "data": [7, 8]}},
        {"user": {"shape": [1, 1], "data": [[7]]}},
        {"user": {"data": [None]}},
        {"item": {"shape": [2, 1], "data": [[0], [1]]}},
        {"item": {"datatype": "UINT8"}},
        {"site": {"data": ["a", None]}},
        {"site": {"shape": [1], "data": ["shared"]}},
        {"site:missing": {"datatype": "BOOL", "shape": [2], "data": [True, False]}},
        {"price:missing": {"datatype": "BOOL", "shape": [2, 1], "data": [True, False]}},
        {"tags": {"data": ["x", "y", "z", "x"]}},
        {"tags": {"shape": [3], "data": ["x", "y", "z"]}, "tags:lengths": {"datatype": "INT64", "shape": [2], "data": [0, 3]}},
        {"tags": {"shape": [0], "data": []}, "tags:lengths": {"datatype": "INT32", "shape": [2], "data": [0, 0]}},
        {"tags": {"shape": [1, 1], "data": [["x"]]}},
        {"price": {"datatype": "INT32", "data": [1, 2]}},
        {"price": {"datatype": "FP64", "data": [1e-300, 2.5]}},
    ],
    ids=str,
)
def test_forms_that_a_feature_may_have(changed: dict[str, Any]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        assert scores(await client.post(INFER, json=listed(2, **changed))) == expected(2)

    run(body)


RUDE_JSON: list[tuple[Any, int, str]] = [
    (b"", 400, "body: got invalid JSON (EOF while parsing a value at line 1 column 0), expected a JSON object in UTF-8"),
    (b"{}", 422, "inputs: got nothing, expected a value"),
    (b"[]", 422, "body: got a list of 0 values, expected an object"),
    ({"inputs": []}, 422, "inputs: got a list of 0 values, expected at least one"),
    ({"inputs": {}}, 422, "inputs: got an object of 0 keys, expected a list"),
    ({"inputs": [1]}, 422, "inputs[0]: got 1, expected an object"),
    ({"inputs": [{"name": "item", "shape": [1], "datatype": "INT64"}]}, 422,
     "inputs.item: got neither, expected either data or parameters.binary_data_size"),
    ({"inputs": [{"name": "", "shape": [1], "datatype": "INT64", "data": [1]}]}, 422, "inputs[0].name: got '', expected"),
    ({**listed(), "inputz": 1}, 422, "inputz: got an unknown key, expected one of id, parameters, inputs, outputs"),
    ({**listed(), "id": 5}, 422, "id: got 5, expected text"),
    ({**listed(), "parameters": {"shared_memory": 1}}, 422, "parameters.shared_memory: got an unknown key"),
    ({**listed(), "parameters": {"timeout": 1.5}}, 422, "parameters.timeout: got 1.5, expected an integer"),
    ({**listed(), "outputs": [{"name": "scores", "parameters": {"classification": 3}}]}, 422,
     "outputs.scores.parameters.classification: got an unknown key, expected one of binary_data"),
    ({**listed(), "outputs": [{"name": "x"}]}, 422, "outputs: got 'x', expected scores"),
    (listed(item={"shape": [-2]}), 422, "inputs[1].shape[0]: got -2, expected greater than or equal to 0"),
    (listed(item={"shape": [2**31]}), 422, "inputs[1].shape[0]: got 2147483648, expected less than 2147483648"),
    (listed(item={"shape": []}), 422, "inputs[1].shape: got a list of 0 values, expected at least one"),
    (listed(item={"shape": [2, 1, 1]}), 413, "inputs[1].shape: got a list of 3 values, expected at most 2"),
    (listed(item={"shape": ["2"]}), 422, "inputs[1].shape[0]: got '2', expected an integer"),
    (listed(item={"shape": [3]}), 422, "inputs.item.data: got 2, expected 3 values, as shape [3] says"),
    (listed(item={"datatype": "INT4"}), 422, "inputs[1].datatype: got 'INT4', expected 'BOOL', 'UINT8'"),
    (listed(item={"data": "01"}), 422, "inputs[1].data: got '01', expected a list"),
    (listed(item={"data": [0, "1"]}), 422, "candidates.item[1]: got '1', expected an integer of 64 bits or null"),
    (listed(item={"data": [0, True]}), 422, "candidates.item[1]: got True, expected an integer of 64 bits or null"),
    (listed(item={"data": [[0], [1]]}), 422, "candidates.item[0]: got [0], expected an integer of 64 bits or null"),
    (listed(item={"data": [0, 2**70]}), 422, "candidates.item[1]: got 1180591620717411303424, expected an integer of 64"),
    (listed(item={"data": [0, 1000]}), 422, "candidates.item[1]: got 1000, expected an id from 0 to 999"),
    (listed(item={"parameters": {"shared_memory_region": "x"}}), 422,
     "inputs.item.parameters.shared_memory_region: got an unknown key, expected one of binary_data_size; tensors travel in"),
    (listed(item={"extra": 1}), 422, "inputs.item.extra: got an unknown key, expected one of name, shape, datatype"),
    (listed(item={"shape": [2, 2], "data": [[0, 1], [2, 3]]}), 422, "inputs.item: got [2, 2], expected shape [n] or [n, 1]"),
    (listed(item={"shape": [0], "data": []}), 422, "candidates.item: got 0, expected at least 1 value"),
    (listed(item=None), 422, "candidates.item: got nothing, expected the feature"),
    (listed(colour={"datatype": "INT64", "shape": [2], "data": [0, 1]}), 422, "inputs: got 'colour', expected"),
    (listed(**{"item:": {"datatype": "INT64", "shape": [2], "data": [0, 1]}}), 422, "inputs: got 'item:', expected"),
    (listed(**{"item:x": {"datatype": "INT64", "shape": [2], "data": [0, 1]}}), 422, "inputs: got 'item:x', expected"),
    (listed(item=None, **{"item:missing": {"datatype": "BOOL", "shape": [2], "data": [True, True]}}), 422,
     "inputs.item: got null, expected its values, as there is item:missing"),
    (listed(**{"item:missing": {"datatype": "BOOL", "shape": [3], "data": [True] * 3}}), 422,
     "inputs.item:missing: got BOOL [3], expected BOOL [2]"),
    (listed(**{"item:missing": {"datatype": "INT8", "shape": [2], "data": [1, 1]}}), 422,
     "inputs.item:missing: got INT8 [2], expected BOOL [2]"),
    (listed(**{"tags:missing": {"datatype": "BOOL", "shape": [2], "data": [True, True]}}), 422,
     "inputs.tags:missing: got a mask, expected none, unless all is missing: a list without values is"),
    (listed(**{"item:lengths": {"datatype": "INT64", "shape": [2], "data": [1, 1]}}), 422,
     "inputs.item:lengths: got lengths, expected none: item has one value a row"),
    (listed(tags={"shape": [4], "data": ["x"] * 4}), 422, "inputs.tags: got [4], expected shape [n, values], or tags:lengths"),
    (listed(tags={"shape": [2, 4], "data": ["x"] * 8}), 422, "candidates.tags[0]: got 4, expected at most 3 values"),
    (bags(2, [-1, 3]), 422,
     "inputs.tags:lengths[0]: got -1, expected 0 or more"),
    (bags(2, [1, 2]), 422,
     "inputs.tags:lengths: got 3, expected a sum of 2, the values of tags"),
    (bags(2, [2**62] * 2), 422, "inputs.tags:lengths[0]: got 4611686018427387904, expected at most the 2 values"),
    (listed(**{"tags:lengths": {"datatype": "INT64", "shape": [2], "data": [2, 2]}}), 422,
     "inputs.tags: got (2, 2) beside INT64 (2,), expected shape [values] beside INT32 or INT64 tags:lengths [n]"),
    (listed(price={"data": [1, 1e999]}), 422, ""),
    (listed(101), 413, "inputs: got 101, expected at most 100 rows"),
    (listed(tags={"shape": [10**9, 0], "data": []}), 413, "inputs: got 1000000000, expected at most 100 rows"),
    (bags(1, [1] + [0] * 100), 413, "inputs: got 101, expected at most 100 rows"),
    ({"parameters": {"encoded": True}, **listed()}, 422, "inputs.site: got 'BYTES', expected ids or numbers"),
    ({"inputs": [{"name": "candidate_ids", "shape": [200, 5], "datatype": "INT32", "data": [0] * 1000}]}, 413,
     "inputs: got 200, expected at most 100 rows"),
    ({"inputs": [{"name": "candidate_ids", "shape": [5], "datatype": "INT32", "data": [0] * 5}]}, 422,
     "context_ids: got null, expected shape [1 or n, 1]"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "status", "message"), RUDE_JSON)
def test_a_rude_request_in_json_is_refused_in_words(sent: Any, status: int, message: str) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        content = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        refused(await client.post(INFER, content=content, headers={"content-type": "application/json"}), status, message)
        assert scores(await client.post(INFER, json=listed())) == expected()

    service = run(body)
    assert [seen.outcome == "ok" for seen in service.seen] == [False, True]


def with_size(name: str, size: Any) -> tuple[bytes, dict[str, str]]:
    content, headers = packed(tensors())
    length = int(headers["Inference-Header-Content-Length"])
    envelope = json.loads(content[:length])
    for one in envelope["inputs"]:
        if one["name"] == name:
            one["parameters"]["binary_data_size"] = size
    header = json.dumps(envelope).encode()
    return header + content[length:], {"Inference-Header-Content-Length": str(len(header))}


GOOD, GOOD_HEADERS = packed(tensors())
RUDE_BINARY: list[tuple[str, bytes, dict[str, str], int, str]] = [
    ("no length", GOOD, {}, 400, "body: got invalid JSON (trailing characters"),
    ("a length beyond the body", GOOD, {"Inference-Header-Content-Length": "99999"}, 422,
     f"Inference-Header-Content-Length: got '99999', expected the envelope's bytes, 0 to {len(GOOD)}"),
    ("a negative length", GOOD, {"Inference-Header-Content-Length": "-1"}, 422, "Inference-Header-Content-Length: got '-"),
    ("a senseless length", GOOD, {"Inference-Header-Content-Length": "1e3"}, 422, "Inference-Header-Content-Length: got '1e"),
    ("an endless length", GOOD, {"Inference-Header-Content-Length": "1" * 99}, 422, "Inference-Header-Content-Length: got '11"),
    ("an odd length", GOOD, {"Inference-Header-Content-Length": "\u00b2"}, 422, "Inference-Header-Content-Length: got "),
    ("no envelope", GOOD, {"Inference-Header-Content-Length": "0"}, 400, "body: got invalid JSON (EOF"),
    ("a byte short", GOOD[:-1], GOOD_HEADERS, 422, "inputs.bias.parameters.binary_data_size: got 8, expected as many bytes as"),
    ("a byte long", GOOD + b"x", GOOD_HEADERS, 422,
     "body: got 73, expected 72 bytes after the envelope, as its binary_data_size add up to"),
    ("too few for the shape", *with_size("item", 15), 422, "body: got 72, expected 71 bytes after the envelope"),
    ("a negative size", *with_size("item", -8), 422, "inputs[1].parameters.binary_data_size: got -8, expected greater than or"),
    ("a size in text", *with_size("item", "16"), 422, "inputs[1].parameters.binary_data_size: got '16', expected an integer"),
    ("a huge size", *with_size("item", 2**60), 422, "inputs[1].parameters.binary_data_size: got 1152921504606846976"),
    ("the wrong shape", *packed(tensors() | {"item": ("INT64", [3], bytes(16))}), 422,
     "inputs.item: got 16, expected 24 bytes, as INT64 [3] has"),
    ("a text cut short", *packed(tensors() | {"site": ("BYTES", [2], b"\x02\0\0\0ab\x09\0\0\0a")}), 422,
     "inputs.site[1]: got 5 bytes left, expected its length in 4 bytes"),
    ("too many texts", *packed(tensors() | {"site": ("BYTES", [2], encoded_texts([b"a"] * 3))}), 422,
     "inputs.site: got 15, expected 10 bytes, which its 2 values take"),
    ("rows without values", *packed(tensors() | {"tags": ("BYTES", [10**9, 0], b"")}), 413,
     "inputs: got 1000000000, expected at most 100 rows"),
    ("a mask of odd bytes", *packed(tensors() | {"bias:missing": ("BOOL", [2], b"\x07\x80")}), 200, ""),
    ("gzip that is none", GOOD, GOOD_HEADERS | {"Content-Encoding": "gzip"}, 422,
     "body: got Error -3 while decompressing data: incorrect header check, expected one whole compressed stream"),
    ("gzip cut short", gzip.compress(GOOD)[:-12], GOOD_HEADERS | {"Content-Encoding": "gzip"}, 422, "body: got a stream cut"),
    ("gzip twice over", gzip.compress(GOOD) * 2, GOOD_HEADERS | {"Content-Encoding": "gzip"}, 422, "body: got bytes after the"),
    ("a bomb", gzip.compress(bytes(9_000_000)), {"Content-Encoding": "gzip"}, 413,
     "body: got more than 20000 bytes when decompressed, expected at most 20000"),
    ("a deflated bomb", zlib.compress(bytes(9_000_000)), {"Content-Encoding": "deflate"}, 413, "body: got more than"),
    ("an unknown compression", GOOD, GOOD_HEADERS | {"Content-Encoding": "zstd"}, 415, "Content-Encoding: got 'zstd'"),
    ("too long", bytes(20_001), GOOD_HEADERS, 413, "Content-Length: got '20001', expected at most 20000"),
    ("a media type of another kind", GOOD, GOOD_HEADERS | {"Content-Type": "text/html"}, 415, "Content-Type: got 'text"),
    ("a huge envelope", json.dumps({"inputs": [{"name": "x"}] * 900}).encode(), {}, 422,
     "inputs[0].shape: got nothing, expected a value"),
    ("deep lists", b'{"inputs":' + b"[" * 9000, {}, 400, "body: got invalid JSON (recursion limit"),
    ("many unknown keys", json.dumps({f"k{i}": 1 for i in range(1400)} | listed()).encode(), {}, 422, "k0: got an unknown key"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "headers", "status", "message"), [case[1:] for case in RUDE_BINARY], ids=[case[0] for case in RUDE_BINARY]
)
def test_a_rude_binary_request_is_refused_in_words(sent: bytes, headers: dict[str, str], status: int, message: str) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post(INFER, content=sent, headers={k: v.encode("utf-8") for k, v in headers.items()})  # type: ignore[misc]
        if status == 200:
            assert answer.status_code == 200, answer.text
        else:
            refused(answer, status, message)
        polite = await client.post(INFER, content=GOOD, headers=GOOD_HEADERS)
        assert scores(polite) == expected()

    run(body)


PATHS: list[tuple[str, str, int, str]] = [
    ("GET", "/v2", 200, ""),
    ("GET", "/v2/", 200, ""),
    ("GET", "/v2/health/live", 200, ""),
    ("GET", "/v2/health/ready", 200, ""),
    ("GET", "/v2/models/fake", 200, ""),
    ("GET", "/v2/models/fake/versions/7", 200, ""),
    ("GET", "/v2/models/fake/versions/7/ready", 200, ""),
    ("GET", "/v2/models/stats", 200, ""),
    ("GET", "/v2/models/fake/versions/7/stats", 200, ""),
    ("POST", "/v2/repository/index", 200, ""),
    ("GET", "/v2/nothing", 404, "route: got '/v2/nothing', expected one of the protocol's that this server has (see /docs)"),
    ("GET", "/v2/models", 404, "route: got '/v2/models'"),
    ("GET", "/v2/models/none", 404, "model: got 'none', expected one of ['fake']"),
    ("GET", "/v2/models/fake/versions/8", 404, "version: got '8', expected '7'"),
    ("GET", "/v2/models/none/ready", 404, "model: got 'none'"),
    ("GET", "/v2/models/fake/infer", 405, "method: got 'GET', expected POST for /v2/models/fake/infer"),
    ("POST", "/v2/models/fake", 405, "method: got 'POST', expected GET for /v2/models/fake"),
    ("PUT", "/v2/repository/index", 405, "method: got 'PUT', expected POST"),
    ("POST", "/v2/models/none/infer", 404, "model: got 'none'"),
    ("POST", "/v2/models/fake/versions/9/infer", 404, "version: got '9'"),
    ("POST", "/v2/models/fake/vs/7/infer", 404, "route: got '/v2/models/fake/vs/7'"),
    ("POST", "/v2/repository/models/fake/load", 404, "route: got "),
    ("GET", "/v2/%ff/%00", 404, "route: got "),
]


@pytest.mark.parametrize(("method", "path", "status", "message"), PATHS)
def test_paths_and_methods(method: str, path: str, status: int, message: str) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.request(method, path)
        if status == 200:
            assert answer.status_code == 200, answer.text
        else:
            refused(answer, status, message)
        allowed = message.split(", expected ")[1].split()[0] if status == 405 else None
        assert answer.headers.get("allow") == allowed

    run(body)


def test_a_prefix_before_the_routes_does_no_harm() -> None:
    """As Serve calls the app of a deployment with a `route_prefix`."""

    async def body(client: httpx.AsyncClient) -> None:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        rest = {"headers": [], "query_string": b"", "scheme": "http", "http_version": "1.1", "raw_path": b""}
        scope = {"type": "http", "method": "GET", "path": "/ctr/v2/models/fake/ready", "root_path": "/ctr", **rest}
        await service.app(scope, receive, send)
        assert sent[0]["status"] == 200

    service = Service()
    service.run(body)


def test_not_ready_is_503_and_unready_models_leave_the_index_of_ready_ones() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        await service.batchers["fake"].close(1)
        refused(await client.get("/v2/health/ready"), 503, "server: got not ready, expected ready")
        refused(await client.get("/v2/models/fake/ready"), 503, "model fake: got not ready, expected ready")
        assert (await client.get("/v2/health/live")).status_code == 200
        everything = (await client.post("/v2/repository/index", json={})).json()
        assert [(m["name"], m["state"]) for m in everything] == [("fake", "UNAVAILABLE")]
        assert (await client.post("/v2/repository/index", json={"ready": True})).json() == []
        refused(await client.post("/v2/repository/index", json={"ready": 1}), 422, "ready: got 1, expected a valid boolean")
        refused(await client.post(INFER, content=GOOD, headers=GOOD_HEADERS), 503, "batcher: got a request after it was closed")

    service = Service(limits=LIMITS)
    service.run(body)


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = FakeEngine()
    engine.go.clear()
    service = Service(engine, limits=LIMITS, max_queued_rows=100)

    async def body(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post(INFER, json=listed(1)))
        await until(lambda: engine.batches == [1])
        second = asyncio.create_task(client.post(INFER, json=listed(90)))
        await until(lambda: service.batchers["fake"].dispatcher.queued_rows == 90)
        answer = await client.post(INFER, json=listed(20))
        refused(answer, 429, "queue: got 90 rows waiting, expected at most 80")
        assert int(answer.headers["retry-after"]) >= 1
        assert 1 <= int(answer.headers["retry-after-ms"]) <= 1000 * int(answer.headers["retry-after"])
        refused(await client.post(INFER, json={**listed(2), "parameters": {"deadline_ms": 5}}), 504, "deadline: got past it")
        engine.go.set()
        assert scores(await first) == expected(1)
        assert scores(await second) == expected(90)

    service.run(body)


def test_a_fault_of_ours_is_500_and_tells_nothing() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        service.models.clear()
        service.models["fake"] = None  # type: ignore[assignment]
        answer = await client.post(INFER, content=GOOD, headers=GOOD_HEADERS | {"X-Request-ID": "r9"})
        refused(answer, 500, "server: got an unexpected error, expected none; its log has it under request id r9")

    service = Service(limits=LIMITS)
    service.run(body)
    assert service.seen[0].outcome == "internal"


def test_a_client_that_hangs_up_is_forgotten() -> None:
    engine = FakeEngine()
    engine.go.clear()
    service = Service(engine, limits=LIMITS)

    async def body(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post(INFER, json=listed(1)))
        await until(lambda: engine.batches == [1])
        whole = {"type": "http.request", "body": json.dumps(listed(5)).encode()}
        assert await call(service.app, [whole, {"type": "http.disconnect"}], path=INFER) == []
        assert service.batchers["fake"].dispatcher.queued_rows == 0
        assert await call(service.app, [{"type": "http.disconnect"}], path=INFER) == []
        engine.go.set()
        assert scores(await first) == expected(1)

    service.run(body)
    assert [seen.outcome for seen in service.seen] == ["cancelled", "cancelled", "ok"]


@pytest.mark.parametrize("path", ["/v2", "/v2/models/fake/infer"])
def test_a_websocket_is_closed(path: str) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await service.app(
            {"type": "websocket", "path": path, "headers": [], "query_string": b"", "root_path": ""}, receive, send
        )
        assert [message["type"] for message in sent] == ["websocket.close"]

    service = Service()
    service.run(body)


def test_both_protocols_share_a_batcher_and_their_statistics() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        ours, theirs = await asyncio.gather(
            client.post("/v1/score", json=request(3)), client.post(INFER, content=GOOD, headers=GOOD_HEADERS)
        )
        assert ours.json()["scores"] == expected(3)
        assert scores(theirs) == expected(2)
        [stats] = (await client.get("/v2/models/fake/stats")).json()["model_stats"]
        assert (stats["inference_count"], stats["inference_stats"]["success"]["count"]) == (5, 2)

    run(body)


def test_the_openapi_page_lists_the_protocol() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        infer = document["paths"]["/v2/models/{model}/infer"]["post"]
        assert set(infer["requestBody"]["content"]) == {"application/octet-stream", "application/json"}
        assert {"/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/{model}", "/v2/models/{model}/ready",
                "/v2/models/{model}/stats", "/v2/repository/index"} <= set(document["paths"])  # fmt: skip
        assert "application/vnd.apache.arrow.stream" in document["paths"]["/v1/score"]["post"]["requestBody"]["content"]

    run(body)


@given(st.data())
def test_a_damaged_request_is_never_a_fault_of_ours(data: st.DataObject) -> None:
    """Bytes changed, cut out or put in anywhere, envelope and tensors alike."""
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        cut = data.draw(st.integers(0, 8))
        content[at : at + cut] = data.draw(st.binary(max_size=8))
    length = int(GOOD_HEADERS["Inference-Header-Content-Length"]) + data.draw(st.integers(-3, 3))
    headers = {"Inference-Header-Content-Length": str(length)}

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post(INFER, content=bytes(content), headers=headers)
        assert answer.status_code in (200, 400, 413, 422), answer.text
        if answer.status_code != 200:
            refused(answer, answer.status_code, "")

    run(body)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(["user", "item", "site", "tags", "price", "bias", "candidate_ids", "tags:lengths", "price:missing"]),
    st.sampled_from(["BOOL", "INT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "BYTES"]),
    st.lists(st.integers(-1, 4), max_size=3),
    st.lists(JSON_VALUES, max_size=5),
    st.booleans(),
)
def test_any_json_tensor_is_scored_or_refused(
    name: str, datatype: str, shape: list[int], values: list[Any], encoded: bool
) -> None:
    sent = listed(2, **{name: {"datatype": datatype, "shape": shape, "data": values}})
    content = json.dumps({**sent, "parameters": {"encoded": encoded}}).encode()

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post(INFER, content=content)
        assert answer.status_code in (200, 400, 413, 422), answer.text

    run(body)


def test_a_crowd_of_rude_and_impatient_clients_leaves_the_polite_ones_their_own_scores() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        async def polite(i: int) -> None:
            content, headers = packed(tensors(1 + i % 5, i), parameters={"binary_data_output": True})
            assert scores(await client.post(INFER, content=content, headers=headers)) == expected(1 + i % 5, i)

        async def rude(i: int) -> None:
            _, sent, headers, status, _ = RUDE_BINARY[i % len(RUDE_BINARY)]
            encoded = [(k.encode(), v.encode()) for k, v in headers.items()]
            assert (await client.post(INFER, content=sent, headers=encoded)).status_code == status

        async def impatient(i: int) -> None:
            task = asyncio.create_task(client.post(INFER, json=listed(90)))
            await asyncio.sleep(0.001 * (i % 3))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*[(polite, rude, impatient)[i % 3](i) for i in range(150)])

    run(body, max_queued_rows=10_000)


def test_a_line_feed_in_a_path_is_a_part_of_it() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.get("/v2/models/a%0Ab/ready")
        assert (answer.status_code, answer.json()) == (404, {"error": "model: got 'a\\nb', expected one of ['fake']"})

    run(body)
