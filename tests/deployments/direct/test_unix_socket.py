"""The direct port at a Unix socket: all that `serve.test_http_app` and `http_api.test_gated` claim, and our client."""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from deployments.client import AsyncClient, Client
from deployments.client.client import ClientError
from tests.deployments.direct.direct_app import served
from tests.deployments.http_api.test_gated import *  # noqa: F403
from tests.deployments.serve.test_http_app import *  # noqa: F403
from tests.deployments.serve.test_http_app import Service, expected
from tests.deployments.serving_doubles import columns


@pytest.fixture(autouse=True)
def by_socket_file(direct: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Service, "socket_path", tmp_path / "score.sock")


def test_both_clients_score_and_are_told_errors_by_a_unix_socket(tmp_path: Path) -> None:
    service, path = Service(), tmp_path / "client.sock"

    def blocking(url: str) -> None:
        with Client(url, "fake") as client:
            assert client.ready()
            assert client.score(columns(3, 2), {"user": 1})[:, 0].tolist() == expected(3, 2)
            with pytest.raises(ClientError, match=r"^422: context.user: got nothing, expected the feature"):
                client.score(columns(3), {})
            with pytest.raises(ClientError, match=r"^404: model: got 'none', expected one of"), Client(url, "none") as other:
                other.score(columns(3), {"user": 1})

    async def body(_: httpx.AsyncClient) -> None:
        async with served(service.app, service.limits, "/ads", path):
            url = f"unix://{path}:/ads"
            async with AsyncClient(url, "fake") as client:
                scores = await asyncio.gather(*(client.score(columns(2, i), {"user": 1}, deadline_s=20) for i in range(20)))
                assert [s[:, 0].tolist() for s in scores] == [expected(2, i) for i in range(20)]
                assert scores[0].dtype == np.float32
            await asyncio.to_thread(blocking, url)

    service.run(body)


@pytest.mark.parametrize("url", ["unix://score.sock", "unix:///run/score.sock:ads"])
def test_a_url_that_is_no_path_of_a_socket_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url: got 'unix://.*', expected unix:///PATH, or unix:///PATH:/PREFIX$"):
        Client(url, "fake")
