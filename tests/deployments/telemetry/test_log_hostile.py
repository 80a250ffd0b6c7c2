"""Text of clients in logs: escaped, and never at the start of a line; whichever route they sent it to."""

import logging
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from deployments.telemetry.log_form import TextForm
from tests.deployments.http_api.test_serve_bypass import Fronted
from tests.deployments.live_app import LiveApp
from tests.deployments.protocol.test_grpc_service import call as grpc_call
from tests.deployments.protocol.test_grpc_service import infer
from tests.deployments.protocol.test_rest import listed
from tests.deployments.serve.test_http_app import request

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import

FORGED = "ERROR 2030-01-01 all is lost"
HOSTILE = f"x\n{FORGED}\r{FORGED}\x1b[2J\x1b]0;title\x07\x00\x9b31m\u2028{FORGED}\u202egnp.exe\x7f\x85{FORGED}"
SERVE = {"x-request-timeout-seconds": "5"}  # has the bypass leave a request to Serve
WAYS = pytest.mark.parametrize("way", [pytest.param({}, id="bypass"), pytest.param(SERVE, id="serve")])


def fit_for_a_log(text: str) -> None:
    """Nothing but its line breaks is a control or formatting character, and no line of it could be taken for another record."""
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines), text
    assert all(line.startswith("  | ") for line in lines[1:]), text


def test_a_traceback_is_whole_and_what_a_client_wrote_in_it_is_escaped() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError(HOSTILE + "\ud800") from None
    except ValueError as error:
        failed = logging.LogRecord("deployments.x", logging.ERROR, "x.py", 1, "failed: caf\xe9 \u6f22", (), None)
        failed.exc_info = (ValueError, error, error.__traceback__)
    text = TextForm().format(failed)
    fit_for_a_log(text)
    assert "test_log_hostile.py" in text
    assert "\\x1b[2J\\x1b]0;title\\x07\\x00\\x9b31m\\u2028" in text
    assert f"\n  | {FORGED}\\r{FORGED}" in text
    assert "failed: caf\xe9 \u6f22\n" in text


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError(HOSTILE)


@WAYS
@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/score", "deployments.scoring.scoring.Scoring.score"),
        ("/v2/models/fake/infer", "deployments.protocol.rest.parse"),
        ("/v2/repository/index", "deployments.protocol.inference.Inference.repository_index"),
    ],
)
def test_a_fault_with_a_clients_text_is_logged_fit_to_read(
    path: str, where: str, way: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(where, broken)

    async def body(client: httpx.AsyncClient) -> None:
        content = request(2) if path == "/v1/score" else listed() if path.endswith("infer") else {}
        headers = [(b"x-request-id", b"a\tb"), *((k.encode(), v.encode()) for k, v in way.items())]
        answer = await client.post(path, json=content, headers=headers)
        assert answer.status_code == 500
        assert FORGED not in answer.text

    Fronted().run(body)
    [record] = [r for r in caplog.records if r.name.startswith("deployments")]
    fit_for_a_log(TextForm().format(record))
    assert FORGED in TextForm().format(record)


@pytest.mark.parametrize("method", ["ModelInfer", "RepositoryIndex"])
def test_so_is_one_over_grpc(method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("deployments.protocol.inference.Inference.infer", broken)
    monkeypatch.setattr("deployments.protocol.inference.Inference.repository_index", broken)
    with LiveApp() as app, grpc.insecure_channel(app.grpc_address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            grpc_call(channel, method, infer() if method == "ModelInfer" else b"")
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert FORGED not in caught.value.details()
    [record] = [r for r in caplog.records if r.name.startswith("deployments")]
    fit_for_a_log(TextForm().format(record))


def with_model(name: str) -> Callable[[httpx.AsyncClient], Any]:
    return lambda client: client.post("/v1/score", json=request(2, model=name))


def with_header(name: str) -> Callable[[httpx.AsyncClient], Any]:
    return lambda client: client.post("/v1/score", json=request(2), headers=[(name.encode(), HOSTILE.encode())])


INFER = listed() | {"id": HOSTILE, "parameters": {HOSTILE: 1}}
HOSTILE_REQUESTS: dict[str, Callable[[httpx.AsyncClient], Any]] = {
    "a model's name": with_model(HOSTILE),
    "a version": lambda c: c.post("/v1/score", json=request(2, version=HOSTILE)),
    "a key": lambda c: c.post("/v1/score", json=request(2, **{HOSTILE: 1})),
    "a feature": lambda c: c.post("/v1/score", json=request(2, context={HOSTILE: 1})),
    "a value": lambda c: c.post("/v1/score", json=request(2, candidates={"item": [HOSTILE]})),
    "a path": lambda c: c.get("/v1/%0aERROR%1b[2J%e2%80%a8"),
    "a model in a path": lambda c: c.get("/v2/models/%0aERROR%1b[2J%e2%80%a8"),
    "a request of the protocol": lambda c: c.post("/v2/models/fake/infer", json=INFER),
    "a method": lambda c: c.request("\x1b[2J", "/v1/score"),
    "a query": lambda c: c.get("/v1/batch-sizes?model=%0aERROR%1b[2J"),
    **{
        f"the header {name}": with_header(name)
        for name in ("x-request-id", "content-type", "content-encoding", "accept", "host", "authorization", "user-agent")
    },
}


@pytest.mark.parametrize("sent", HOSTILE_REQUESTS)
def test_a_hostile_request_leaves_nothing_in_the_log_and_nothing_raw_in_its_answer(
    sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def body(client: httpx.AsyncClient) -> None:
        answer = await HOSTILE_REQUESTS[sent](client)
        assert answer.status_code < 500, answer.text
        assert b"\x1b" not in answer.content
        assert b"\n" not in answer.content.strip()
        assert all(value.decode("latin-1").isprintable() for _, value in answer.headers.raw)

    Fronted().run(body)
    ours = [r for r in caplog.records if r.name.split(".")[0] not in ("httpx", "httpcore", "asyncio")]
    assert [r.getMessage() for r in ours] == []


def test_a_hostile_request_id_is_replaced_before_anything_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deployments.scoring.scoring.Scoring.score", broken)

    async def body(client: httpx.AsyncClient) -> None:
        await client.post("/v1/score", json=request(2), headers=[(b"x-request-id", HOSTILE.encode())])

    Fronted().run(body)
    [record] = caplog.records[-1:]
    assert record.getMessage().split("\n")[0].removeprefix("request ").removesuffix(" failed").isalnum()
