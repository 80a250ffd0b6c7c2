"""Tokens over gRPC: the metadata `authorization`, and the two statuses of those who are not let in."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from deployments.access.gate import Gate
from deployments.protocol.grpc_messages import CLASSES, METHODS
from tests.deployments.access.token_files import made
from tests.deployments.live_app import LiveApp
from tests.deployments.protocol.test_grpc_service import call, infer


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[grpc.Channel, dict[str, str], LiveApp]]:
    file = tmp_path_factory.mktemp("access") / "tokens.yaml"
    tokens = made(file, ranker=["score"], boss=["admin"])
    with LiveApp(gate=Gate(str(file))) as app, grpc.insecure_channel(app.grpc_address) as channel:
        yield channel, tokens, app


def status(channel: grpc.Channel, method: str, request: Any, token: str | None) -> tuple[grpc.StatusCode, str]:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    try:
        call(channel, method, request, metadata=metadata)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_inference_takes_the_scope_score(guarded: tuple[grpc.Channel, dict[str, str], LiveApp]) -> None:
    channel, tokens, app = guarded
    nothing, unknown = (status(channel, "ModelInfer", infer(), token) for token in (None, "dpi_x"))
    assert nothing == (grpc.StatusCode.UNAUTHENTICATED, "authorization: got no bearer token, expected one bearer token")
    assert unknown[0] == grpc.StatusCode.UNAUTHENTICATED
    lacks = "authorization: got a token without the scope 'score', expected one with it"
    assert status(channel, "ModelInfer", infer(), tokens["boss"]) == (grpc.StatusCode.PERMISSION_DENIED, lacks)
    assert [seen.outcome for seen in app.seen] == ["unauthenticated", "unauthenticated", "forbidden"]
    assert status(channel, "ModelInfer", infer(), tokens["ranker"])[0] == grpc.StatusCode.OK


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ModelInfer"])
def test_every_other_method_takes_any_token(method: str, guarded: tuple[grpc.Channel, dict[str, str], LiveApp]) -> None:
    channel, tokens, _ = guarded
    request = CLASSES[f"{method}Request"]()
    if "name" in request.DESCRIPTOR.fields_by_name:
        request.name = "fake"
    assert status(channel, method, request, None)[0] == grpc.StatusCode.UNAUTHENTICATED
    assert status(channel, method, b"\xff\xff", None)[0] == grpc.StatusCode.UNAUTHENTICATED  # its message is not read
    for token in tokens.values():
        assert status(channel, method, request, token)[0] == grpc.StatusCode.OK
