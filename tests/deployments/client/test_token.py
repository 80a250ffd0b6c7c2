"""The clients' token: given, or from the environment; sent with each request, shown nowhere."""

import asyncio
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.access.gate import Gate
from deployments.client.client import AsyncClient, Client, ClientError
from tests.deployments.access.token_files import made
from tests.deployments.live_app import LiveApp
from tests.deployments.serving_doubles import columns

KINDS = [Client, AsyncClient]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access") / "tokens.yaml"


@pytest.fixture(scope="module")
def tokens(file: Path) -> dict[str, str]:
    return made(file, ranker=["score"], boss=["admin"]) | {"unknown": "dpi_unknown"}


@pytest.fixture(scope="module")
def live(tokens: dict[str, str], file: Path) -> Iterator[LiveApp]:
    with LiveApp(gate=Gate(str(file))) as app:
        yield app


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPIFRAME_TOKEN", raising=False)


def scored(kind: Any, url: str, **how: Any) -> Any:
    """What a score of two candidates gives, whether the service was ready, and how the client shows itself."""
    if kind is Client:
        with Client(url, "fake", **how) as client:
            return client.score(columns(2), {"user": 1}), client.ready(), repr(client) + repr(vars(client))

    async def main() -> Any:
        async with AsyncClient(url, "fake", **how) as client:
            return await client.score(columns(2), {"user": 1}), await client.ready(), repr(client) + repr(vars(client))

    return asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["argument", "environment", "argument over environment"])
def test_a_token_opens_the_service_and_is_never_shown(
    kind: Any, by: str, live: LiveApp, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    if by != "argument":
        monkeypatch.setenv("DPIFRAME_TOKEN", tokens["ranker" if by == "environment" else "unknown"])
    scores, ready, shown = scored(kind, live.url, **({} if by == "environment" else {"token": tokens["ranker"]}))
    assert (scores.shape, ready) == ((2, 1), True)
    assert tokens["ranker"] not in shown
    assert tokens["ranker"] not in "".join(str(vars(r)) for r in caplog.records if r.name.startswith(("httpx", "deployments")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "status"), [("unknown", 401), ("boss", 403), ("", 401)])
def test_a_refusal_is_an_error_at_once_that_does_not_show_the_token(
    kind: Any, name: str, status: int, live: LiveApp, tokens: dict[str, str]
) -> None:
    token = tokens.get(name, "")
    before = len(live.seen)
    with pytest.raises(ClientError) as caught:
        scored(kind, live.url, token=token)
    assert caught.value.status == status
    assert len(live.seen) == before + 1
    assert not token or token not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", ["sec ret", "secret\n", "secret\r\nX-Evil: 1", "sécret", "secret" * 100])
def test_what_cannot_stand_in_a_header_is_refused_unseen(kind: Any, token: str) -> None:
    with pytest.raises(ValueError, match="token: got other characters or more, expected") as caught:
        kind("http://127.0.0.1:1", "m", token=token)
    assert "ecret" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_connection_does_not_show_it_either(kind: Any) -> None:
    secret = "s3" + "cret"  # a traceback shows this file's lines

    def lost(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == f"Bearer {secret}"
        raise httpx.ReadTimeout("slow", request=request)

    with pytest.raises(ClientError) as caught:
        scored(kind, "http://test", token=secret, transport=httpx.MockTransport(lost))
    assert secret not in "".join(traceback.format_exception(caught.value))


def test_no_token_is_sent_without_one() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert "authorization" not in request.headers
        return httpx.Response(200)

    with Client("http://test", "m", transport=httpx.MockTransport(answer)) as client:
        assert client.ready()
