"""A service for other hosts as a user starts it, in both topologies: every way in asks for a token; a new file is followed; and
what becomes of it without Ray.
"""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pyarrow.parquet as pq
import pytest

from deployments.protocol.grpc_messages import CLASSES, SERVICE
from tests.deployments.access.token_files import bearing, made
from tests.deployments.collector import Collector
from tests.deployments.own_ports import own_port
from tests.deployments.server_process import Server
from tests.deployments.tls.certificates import certificate, trusting

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def services(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SimpleNamespace]]:
    """Of both topologies, side by side: starts are waited for together."""
    with Collector() as collector, ExitStack() as stack:
        yield {
            topology: stack.enter_context(served(topology, demo_bundle, tmp_path_factory.mktemp("access"), collector))
            for topology in ("colocated", "fanin")
        }


@pytest.fixture(scope="module", params=["colocated", "fanin"])
def guarded(request: pytest.FixtureRequest, services: dict[str, SimpleNamespace]) -> SimpleNamespace:
    service = services[request.param]
    service.server.wait_ready()
    return service


@contextmanager
def served(topology: str, demo_bundle: Path, folder: Path, collector: Collector) -> Iterator[SimpleNamespace]:
    grpc_port, tls_port, direct_port = (own_port() for _ in range(3))
    pem, key = certificate(folder, "service")
    tls = {"port": tls_port, "certificate": str(pem), "key": str(key)}
    config = {
        "models": [{"path": str(demo_bundle)}], "models_root": str(demo_bundle.parent),
        "http": {"host": "0.0.0.0", "tls": tls, "direct_port": direct_port},
        "grpc": {"port": grpc_port}, "access": {"tokens": str(folder / "tokens.yaml")}, "topology": topology,
        "tracing": {"endpoint": collector.endpoint, "sample": 0},
        "score_log": {"folder": str(folder / "rows"), "sample": 1, "every_s": 1},
    }  # fmt: skip
    if topology == "fanin":
        config["ingress_replicas"] = 1
    (folder / "config.yaml").write_text(json.dumps(config))
    tokens = made(folder / "tokens.yaml", ranker=["score"], boss=["admin"])
    with Server(folder / "config.yaml") as server:
        server.wait_for("Starting HAProxy")  # the next one looks for free ports after that
        example = (demo_bundle / "example.json").read_bytes()
        yield SimpleNamespace(
            server=server, tokens=tokens, file=folder / "tokens.yaml", grpc_port=grpc_port, example=example,
            collector=collector, rows=folder / "rows", tls_port=tls_port, pem=pem,
            direct_port=direct_port, topology=topology,
        )  # fmt: skip


def score(guarded: SimpleNamespace, headers: dict[str, str], port: int = 0) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    return httpx.post(f"http://127.0.0.1:{port or guarded.server.port}/v1/score", content=guarded.example, headers=headers)


def test_tls_leads_to_the_same_service_and_asks_for_the_same_token(guarded: SimpleNamespace) -> None:
    url, headers = f"https://localhost:{guarded.tls_port}/v1/score", {"content-type": "application/json"}
    with httpx.Client(verify=trusting(guarded.pem)) as client:
        assert client.post(url, content=guarded.example, headers=headers).status_code == 401
        answer = client.post(url, content=guarded.example, headers=headers | bearing(guarded.tokens["ranker"]))
    assert answer.json()["scores"] == score(guarded, bearing(guarded.tokens["ranker"])).json()["scores"]
    assert f"TLS at 0.0.0.0:{guarded.tls_port}" in guarded.server.output


def test_every_way_in_asks_for_a_token(guarded: SimpleNamespace) -> None:
    server, tokens = guarded.server, guarded.tokens
    (state,) = server.states()
    (config,) = state.glob("haproxy/*/haproxy.cfg")
    give_up, own = time.monotonic() + 20, set[int]()
    while len(own) < 2:  # the replica's, and Serve's own proxy behind it, which may come a moment later
        assert time.monotonic() < give_up, config.read_text()
        own = {int(port) for port in re.findall(r"^    server \S+ [\d.]+:(\d+) check ", config.read_text(), re.MULTILINE)}
        time.sleep(0.1)
    for through_serve in ({}, {"x-request-timeout-seconds": "60"}):
        for port in (server.port, guarded.direct_port, *own):
            refused = score(guarded, through_serve, port)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert score(guarded, through_serve | bearing(tokens["boss"]), port).status_code == 403
            assert score(guarded, through_serve | bearing(tokens["ranker"]), port).status_code == 200
    for path in ("/v1/models", "/v1/batch-sizes", "/docs", "/openapi.json", "/v2", "/v2/health/ready", "/nothing"):
        assert httpx.get(server.url + path).status_code == 401, path
        assert httpx.get(server.url + path, headers=bearing(tokens["boss"])).status_code == (404 if "no" in path else 200), path
    for path in ("/livez", "/readyz", "/-/healthz"):
        assert httpx.get(server.url + path).status_code == 200, path


def test_a_request_that_is_traced_sends_its_spans_and_its_rows_are_logged(guarded: SimpleNamespace) -> None:
    trace = os.urandom(16).hex()
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x-request-id": trace}
    answer = score(guarded, headers | bearing(guarded.tokens["ranker"]))
    give_up = time.monotonic() + 60
    while True:
        spans = {span.name: span for span in guarded.collector.spans() if span.trace_id.hex() == trace}
        logged = [row for file in guarded.rows.rglob("*.parquet") for row in pq.read_table(file, partitioning=None).to_pylist()]
        scores = [row["@score"] for row in logged if row["@request_id"] == trace]
        if "score" in spans and scores:  # the last one of a request; some may be sent before it
            break
        assert time.monotonic() < give_up, (spans, len(logged))
        time.sleep(0.2)
    assert set(spans) == {"score", "receive", "validate", "encode", "queue", "device", "answer"}
    device = spans["device"]
    device_ms = (device.end_time_unix_nano - device.start_time_unix_nano) / 1e6
    assert device_ms == pytest.approx(answer.json()["timing_ms"]["device"], abs=2e-3)
    assert scores == answer.json()["scores"]


def test_grpc_asks_too(guarded: SimpleNamespace) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{guarded.grpc_port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ServerReady")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=20)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        answer = call(b"", timeout=20, metadata=[("authorization", f"Bearer {guarded.tokens['boss']}")])
        assert CLASSES["ServerReadyResponse"].FromString(answer).ready


def test_headers_of_64_kilobytes_are_refused(guarded: SimpleNamespace) -> None:
    assert score(guarded, bearing(guarded.tokens["ranker"]) | {"x-long": "x" * 65_536}).status_code == 400


def test_no_process_has_a_token_of_a_client_in_its_command_or_says_it(guarded: SimpleNamespace) -> None:
    (state,) = guarded.server.states()
    files = [path for path in (state / "ray").rglob("*") if path.is_file() and path.suffix in (".log", ".err", ".out")]
    logs = [path.read_bytes() for path in files]
    assert logs
    for token in guarded.tokens.values():
        assert all(token not in command for command in guarded.server.processes().values())
        assert all(token.encode() not in log for log in logs)


def test_a_new_file_takes_the_old_ones_place_without_a_restart(guarded: SimpleNamespace) -> None:
    old = guarded.tokens["ranker"]
    new = made(guarded.file, ranker=["score"])["ranker"]
    give_up = time.monotonic() + 60
    while (statuses := (score(guarded, bearing(old)).status_code, score(guarded, bearing(new)).status_code)) != (401, 200):
        assert time.monotonic() < give_up, statuses
        time.sleep(0.1)
    assert os.getpgid(guarded.server.process.pid)
    guarded.tokens["ranker"] = new


def test_a_service_whose_ray_is_lost_answers_what_it_has_says_why_and_leaves_no_process(guarded: SimpleNamespace) -> None:
    """Ray starts a raylet and a control service once. The last test of this service."""
    server, vital = guarded.server, {"colocated": "raylet", "fanin": "gcs_server"}[guarded.topology]
    headers = {"content-type": "application/json"} | bearing(guarded.tokens["ranker"])
    outcomes = Counter[str]()

    def client(url: str, verify: object) -> None:
        with httpx.Client(base_url=url, verify=verify, headers=headers, timeout=30) as asking:
            while True:
                try:
                    outcomes[str(asking.post("/v1/score", content=guarded.example).status_code)] += 1
                except httpx.ConnectError:
                    return
                except httpx.TransportError as error:
                    outcomes[repr(error)] += 1

    ways = [(server.url, True), (f"http://127.0.0.1:{guarded.direct_port}", True)]
    ways += [(f"https://localhost:{guarded.tls_port}", trusting(guarded.pem))]
    clients = [threading.Thread(target=client, args=way) for way in ways * 2]
    for thread in clients:
        thread.start()
    give_up = time.monotonic() + 30
    while outcomes["200"] < 30 and time.monotonic() < give_up:
        time.sleep(0.01)
    (pid,) = [pid for pid, command in server.processes().items() if command.split()[0].endswith(f"/{vital}")]
    os.kill(pid, signal.SIGKILL)
    said, _ = server.process.communicate(timeout=40)
    for thread in clients:
        thread.join(30)
    print(outcomes)
    assert outcomes["200"] >= 30
    assert outcomes.total() - outcomes["200"] <= len(clients)  # one that crossed the end of its connection
    assert not any(status in outcomes for status in ("500", "502", "503", "504"))
    assert server.process.returncode == 1
    assert f"error: ray: got the end of its {vital}, expected it to outlive the service, which stops" in said
    assert server.processes() == {}
    (state,) = server.states()  # its logs stay
    shutil.rmtree(state)
