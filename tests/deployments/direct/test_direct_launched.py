"""The direct port as a user starts it: the fan-in on the CPU, two ingresses at one port; the death of one, the end of both."""

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from deployments.client import Client
from tests.deployments.fanin.test_fanin_launched import replicas, wait_for
from tests.deployments.own_ports import own_port
from tests.deployments.server_process import Server, listens, outcomes_of_ctrl_c_under_load

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PORT = own_port()
SOCKET = Path(tempfile.gettempdir()) / f"dpiframe-{os.getpid()}-{PORT}.sock"
HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("configs") / "direct.yaml"
    http = f"{{direct_port: {PORT}, direct_socket: {SOCKET}}}"
    config.write_text(f"models: [{{path: {demo_bundle}}}]\ntopology: fanin\ningress_replicas: 2\ndrain_s: 20\nhttp: {http}\n")
    with Server(config) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def example(demo_bundle: Path) -> bytes:
    return (demo_bundle / "example.json").read_bytes()


def gone(pid: int) -> bool:
    """Whether all threads of a process have ended, and its sockets with them."""
    states = set()
    for thread in Path(f"/proc/{pid}").glob("task/*/stat"):
        with contextlib.suppress(OSError):
            states.add(thread.read_text().rpartition(")")[2].split()[0])
    return states <= {*"ZX"}


def client() -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{PORT}", headers=HEADERS, timeout=30)


def test_it_answers_what_the_other_port_does(server: Server, example: bytes) -> None:
    wanted = httpx.post(f"{server.url}/v1/score", content=example, headers=HEADERS).json()["scores"]
    with client() as direct:
        for _ in range(4):
            answer = direct.post("/v1/score", content=example, headers={"x-request-id": "one"})
            assert answer.json()["scores"] == wanted
            assert answer.headers.get_list("x-request-id") == ["one"]
        for path in ("/livez", "/readyz", "/v1/models", "/docs", "/openapi.json", "/metrics", "/v2"):
            assert direct.get(path).status_code == 200, path
        request = json.loads(example)
        with Client(f"unix://{SOCKET}", "demo") as local:
            np.testing.assert_allclose(local.score(request["candidates"], request["context"])[:, 0], wanted, atol=1e-6)
        models = direct.get("/v1/models").json()
        assert models == httpx.get(f"{server.url}/v1/models").json()


def test_clients_that_nobody_has_accepted_outlive_a_killed_ingress(server: Server, example: bytes) -> None:
    """The listening socket is one for both: whoever lives answers, and so does the successor of who died. Clients that the one
    who lives had handed to the other one before the kernel was done with it are cut: they are not asked here.
    """
    first, *_ = replicas(server, "Ingress")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: gone(first))

    def score() -> int:
        with client() as fresh:
            return len(fresh.post("/v1/score", content=example).json()["scores"])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: score(), range(40))) == {len(json.loads(example)["candidates"]["C9"])}
    wait_for(lambda: len(replicas(server, "Ingress")) == 2)
    assert score()
    with Client(f"unix://{SOCKET}", "demo") as local:
        assert local.ready()


def test_ctrl_c_under_load_loses_no_request_and_frees_the_port(server: Server, example: bytes) -> None:
    """The last test of this server."""
    outcomes = outcomes_of_ctrl_c_under_load(server, example, PORT)
    assert outcomes.keys() == {"scored", "late"}, outcomes
    assert outcomes["late"] == 2
    assert not listens(PORT)
    assert not SOCKET.exists()
    assert "Traceback" not in server.output
