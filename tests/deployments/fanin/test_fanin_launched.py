"""The fan-in as a user starts it: one engine and two ingresses on the CPU, HAProxy in front, the direct port beside it; deaths,
and Ctrl-C under load.
"""

import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from deployments.client import Client
from tests.deployments.own_ports import own_port
from tests.deployments.server_process import Server, listens, outcomes_of_ctrl_c_under_load, score

pytestmark = [pytest.mark.ray, pytest.mark.slow]
METRICS_PORT, PORT = own_port(), own_port()
SOCKET = Path(tempfile.gettempdir()) / f"dpiframe-{os.getpid()}-{PORT}.sock"
HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("configs") / "fanin.yaml"
    wanted = f"metrics: {{port: {METRICS_PORT}}}\nlog_format: json\ndrain_s: 20\n"
    wanted += f"http: {{direct_port: {PORT}, direct_socket: {SOCKET}}}\n"
    config.write_text(f"models: [{{path: {demo_bundle}}}]\ntopology: fanin\ningress_replicas: 2\n{wanted}")
    with Server(config) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def example(demo_bundle: Path) -> bytes:
    return (demo_bundle / "example.json").read_bytes()


def replicas(server: Server, deployment: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = os.getsid(int(folder.name)) == server.process.pid
            if ours and f"ServeReplica:dpiframe:{deployment}" in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return found


def gone(pid: int) -> bool:
    """Whether all threads of a process have ended, and its sockets with them."""
    states = set()
    for thread in Path(f"/proc/{pid}").glob("task/*/stat"):
        with contextlib.suppress(OSError):
            states.add(thread.read_text().rpartition(")")[2].split()[0])
    return states <= {*"ZX"}


def client() -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{PORT}", headers=HEADERS, timeout=30)


def wait_for(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 120
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_scores_models_and_batch_sizes_are_those_of_the_engine(server: Server, demo_bundle: Path, example: bytes) -> None:
    from dpiframe_core.engine.engine import Engine

    engine = Engine.load(demo_bundle, "cpu")
    engine.warmup()
    request = json.loads(example)
    wanted = engine.score(request["candidates"], request["context"])[:, 0]
    (before, *_) = counts(server)
    for _ in range(6):  # of both ingresses
        answer = score(server.url, example)
        assert answer.status_code == 200, answer.text
        assert np.array_equal(np.float32(answer.json()["scores"]), wanted)
    assert counts(server)[0] == before + 6
    (model,) = httpx.get(f"{server.url}/v1/models").json()["models"]
    assert (model["device"], model["precision"]) == (engine.device, engine.precision)
    engine.close()


def test_an_ingress_answers_scoring_in_front_of_serve(server: Server, example: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"caf\xe9")]  # for Serve a 500
    for _ in range(4):
        answer = httpx.post(f"{server.url}/v1/score", content=example, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get_list("x-request-id") == [answer.json()["request_id"]]
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 500


def logged(state: Path, text: str) -> list[str]:
    """Lines of the replicas' logs with that in them."""
    files = state.glob("ray/session_latest/logs/worker-*.err")
    return [line for file in files for line in file.read_text().splitlines() if text in line]


def counts(server: Server) -> list[int]:
    sizes = httpx.get(f"{server.url}/v1/batch-sizes").json()
    return [sum(sizes["counts"].values())]


def test_an_ingress_has_no_torch_in_it(server: Server) -> None:
    ingresses, (engine,) = replicas(server, "Ingress"), replicas(server, "Engine")
    assert len(ingresses) == 2
    assert "libtorch" in Path(f"/proc/{engine}/maps").read_text()
    for ingress in ingresses:
        assert "libtorch" not in Path(f"/proc/{ingress}/maps").read_text()


def test_the_direct_port_answers_what_the_other_one_does(server: Server, example: bytes) -> None:
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


def test_liveness_readiness_and_the_documentation_answer(server: Server) -> None:
    for path in ("/livez", "/readyz", "/-/healthz", "/docs", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 200, path


def test_prometheus_sees_requests_at_the_ingresses_and_waiting_rows_at_the_engine_alone(server: Server, example: bytes) -> None:
    url = next(line.split()[-1] for line in server.output.splitlines() if "metrics at" in line)
    assert url == f"http://127.0.0.1:{METRICS_PORT}/metrics"
    for _ in range(4):  # of both ingresses
        score(server.url, example)

    def tags(metric: str, url: str = url) -> set[str]:
        lines = [line for line in httpx.get(url).text.splitlines() if line.startswith(f"ray_dpiframe_{metric}{{")]
        return {name for line in lines for name in re.findall(r'deployment="(\w+)"', line)}

    wait_for(lambda: bool(tags("requests_total") and tags("queued_rows") and tags("device_busy_ms_total")))
    assert tags("requests_total") == {"Ingress"}
    assert tags("queued_rows") == tags("inflight_rows") == tags("device_busy_ms_total") == {"Engine"}
    wait_for(lambda: bool(tags("scores_bucket") and tags("model_ready")))
    assert tags("scores_bucket") == tags("model_info") == tags("model_ready") == {"Ingress"}


def test_either_ingress_answers_the_metrics_of_all_processes(server: Server) -> None:
    def replicas_of(page: str) -> dict[str, set[str]]:
        lines = [
            line for line in page.splitlines() if line.startswith(("ray_dpiframe_model_ready{", "ray_dpiframe_queued_rows{"))
        ]
        tags = [(tag[1], tag[2]) for line in lines if (tag := re.search(r'deployment="(\w+)".*replica="(\w+)"', line))]
        return {deployment: {r for d, r in tags if d == deployment} for deployment, _ in tags}

    def sizes(page: str) -> dict[str, int]:
        return {deployment: len(found) for deployment, found in replicas_of(page).items()}

    wait_for(lambda: all(sizes(httpx.get(f"{server.url}/metrics").text) == {"Engine": 1, "Ingress": 2} for _ in range(4)))


def test_without_its_engine_the_service_answers_503_at_once_and_recovers_by_itself(server: Server, example: bytes) -> None:
    (engine,) = replicas(server, "Engine")
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
    refused = score(server.url, example)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    (state,) = server.states()
    wait_for(lambda: len(logged(state, "engine 0 is gone")) == 2)  # each ingress says so
    for line in logged(state, "engine 0 is gone"):
        assert {k: v for k, v in json.loads(line).items() if k != "time"} == {
            "level": "warning",
            "logger": "deployments.fanin.engine_search",
            "message": "engine 0 is gone",
        }
    wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)
    wait_for(lambda: [score(server.url, example).status_code for _ in range(4)] == [200] * 4)


def test_a_killed_ingress_is_replaced_and_clients_that_nobody_has_accepted_outlive_it(server: Server, example: bytes) -> None:
    """The direct port's listening socket is one for both: whoever lives answers, and so does the successor of who died. Clients
    that the one who lives had handed to the other one before the kernel was done with it are cut: they are not asked here.
    """
    ingress, other = replicas(server, "Ingress")
    os.kill(ingress, signal.SIGKILL)
    wait_for(lambda: gone(ingress))

    def scored() -> int:
        with client() as fresh:
            return len(fresh.post("/v1/score", content=example).json()["scores"])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: scored(), range(40))) == {len(json.loads(example)["candidates"]["C9"])}
    wait_for(lambda: len(replicas(server, "Ingress")) == 2 and ingress not in replicas(server, "Ingress"))
    assert other in replicas(server, "Ingress")
    wait_for(lambda: [score(server.url, example).status_code for _ in range(8)] == [200] * 8)
    assert scored()
    with Client(f"unix://{SOCKET}", "demo") as local:
        assert local.ready()


def test_ctrl_c_under_load_of_both_ports_loses_no_request_and_frees_them(server: Server, example: bytes) -> None:
    """The last test of this server."""
    outcomes = outcomes_of_ctrl_c_under_load(server, example, server.port, PORT)
    assert outcomes.keys() == {"scored", "late"}, outcomes
    assert outcomes["late"] == 2
    assert not listens(PORT)
    assert not SOCKET.exists()
    assert "Traceback" not in server.output
