"""The real thing on loopback: `dpiframe serve` as a user starts it, Ray Serve behind HAProxy, requests through it; and a second
instance beside it, with the protocol over HTTP and gRPC.
"""

import json
import logging
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from deployments.client.client import Client
from deployments.protocol.grpc_messages import CLASSES, SERVICE
from tests.deployments.own_ports import own_port
from tests.deployments.server_process import Server, outcomes_of_ctrl_c_under_load, score

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LIMIT_BYTES = 1_000_000


@pytest.fixture(scope="module")
def server(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("configs") / "patient.yaml"
    config.write_text(f"models: [{{path: {demo_bundle}}}]\ndrain_s: 20\n")  # a busy host may take longer than the default
    with Server(config) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def example(demo_bundle: Path) -> bytes:
    return (demo_bundle / "example.json").read_bytes()


def test_scores_over_http_are_those_of_the_engine(server: Server, demo_bundle: Path, example: bytes) -> None:
    from dpiframe_core.engine.engine import Engine

    engine = Engine.load(demo_bundle, "cpu")
    engine.warmup()
    request = json.loads(example)
    wanted = engine.score(request["candidates"], request["context"])[:, 0]
    engine.close()
    answer = score(server.url, example)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get_list("x-request-id") == [answer.json()["request_id"]]
    assert "server" not in answer.headers  # uvicorn, whose port was taken over, would say its name
    assert np.array_equal(np.float32(answer.json()["scores"]), wanted)


def test_scoring_is_answered_in_front_of_serve_but_for_what_only_serve_does(server: Server, example: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"caf\xe9")]  # for Serve a 500
    answer = httpx.post(f"{server.url}/v1/score", content=example, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get_list("x-request-id") == [answer.json()["request_id"]]
    infer = httpx.post(f"{server.url}/v2/models/small/infer", content=b"{", headers=headers)
    assert infer.status_code == 404
    assert infer.json() == {"error": "model: got 'small', expected one of ['demo']"}
    assert len(infer.headers.get_list("x-request-id")) == 1
    # So many values are encoded on a thread. A lone request may else be answered before Serve's timer has a turn.
    asked = json.loads(example)
    asked["candidates"] = {name: values * 600 for name, values in asked["candidates"].items()}
    timed = httpx.post(f"{server.url}/v1/score", json=asked, headers={"x-request-timeout-seconds": "1e-6"})
    assert (timed.status_code, timed.text[:8]) == (408, "Request ")
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 500


def test_liveness_readiness_serves_own_health_and_the_documentation_answer(server: Server) -> None:
    for path in ("/livez", "/readyz", "/-/healthz", "/docs", "/openapi.json", "/v1/models", "/v1/batch-sizes"):
        assert httpx.get(server.url + path).status_code == 200, path


def test_prometheus_sees_the_requests_of_the_model_at_rays_endpoint_and_ours_alone_at_the_services(
    server: Server, example: bytes
) -> None:
    score(server.url, example)
    url = next(line.split()[-1] for line in server.output.splitlines() if "metrics at" in line)
    seen = re.compile(r'^ray_dpiframe_requests_total\{.*model="demo",.*outcome="ok",.*version="1"\} [1-9]', re.MULTILINE)
    for source in (url, f"{server.url}/metrics"):
        give_up = time.monotonic() + 40  # Ray reports every ten seconds
        while not seen.search(text := httpx.get(source).text):
            assert time.monotonic() < give_up, [line for line in text.splitlines() if "dpiframe" in line]
            time.sleep(1)
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert {line.split("{")[0].split(" ")[-1][:13] for line in lines if line[0] != "#"} == {"ray_dpiframe_", "0"}
    assert "ray_dpiframe_unreachable_nodes 0" in lines
    for name in ("model_info", "model_ready", "device_active_ms_total", "scores_bucket", "batches_total", "values_total"):
        assert [line for line in lines if line.startswith(f"ray_dpiframe_{name}{{") and 'version="1"' in line], name


def test_clients_reach_the_service_on_loopback_only_and_ray_only_with_a_token_that_its_user_can_read(server: Server) -> None:
    listening = {(address, port) for address, port in listeners() if port == server.port}
    assert listening == {("127.0.0.1", server.port)}
    (state,) = server.states()
    token = state / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    environment = Path(f"/proc/{pid_of('raylet', server)}/environ").read_bytes().split(b"\0")
    assert b"RAY_AUTH_MODE=token" in environment
    assert f"RAY_AUTH_TOKEN_PATH={token}".encode() in environment


def test_what_nobody_asks_in_a_private_cluster_is_left_out(server: Server) -> None:
    """Of Ray's processes, and pandas of the command and its workers: the controller, two proxies and a replica at least."""
    commands = server.processes()
    assert [c for c in commands.values() if re.search(r"/(dashboard|monitor|log_monitor)\.py", c)] == []
    pids = [pid for pid, c in commands.items() if pid == server.process.pid or re.match(r"ray::(?!\w+Agent)", c)]
    assert len(pids) >= 5
    assert [commands[pid] for pid in pids if "/pandas/" in Path(f"/proc/{pid}/maps").read_text()] == []


def test_its_workers_and_haproxy_have_places_for_all_connections_before_they_come(server: Server) -> None:
    """Else a HAProxy that was just started answers nobody while the kernel's table of its descriptors is doubled."""
    of_clients = {pid: c for pid, c in server.processes().items() if re.search(r"haproxy$|ServeReplica|Proxy", c)}
    assert len(of_clients) >= 3
    status = {c: Path(f"/proc/{pid}/status").read_text() for pid, c in of_clients.items()}
    assert {c: text for c, text in status.items() if int(text.partition("FDSize:")[2].split()[0]) < 8_704} == {}


def test_a_client_that_stalls_in_the_middle_of_a_request_is_dropped_within_a_minute(server: Server) -> None:
    (state,) = server.states()
    (config,) = state.glob("haproxy/*/haproxy.cfg")
    (seconds,) = re.findall(r"^\s*timeout client (\d+)s$", config.read_text(), re.MULTILINE)
    assert int(seconds) <= 60


class Protocols:
    def __init__(self, server: Server, grpc_port: int, example: dict[str, Any]) -> None:
        self.server, self.grpc_port, self.example = server, grpc_port, example
        self.url = server.url
        answer = httpx.post(f"{server.url}/v1/score", json=example, timeout=30)
        self.scores = np.float32(answer.json()["scores"])[:, None]


@pytest.fixture(scope="module")
def served(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protocols]:
    """A second instance, as nohup starts it: its processes ignore SIGINT."""
    grpc_port = own_port()
    config = tmp_path_factory.mktemp("config") / "grpc.yaml"
    config.write_text(
        f"models: [{{path: {demo_bundle}}}]\ngrpc: {{port: {grpc_port}}}\nlimits: {{max_body_bytes: {LIMIT_BYTES}}}\n"
    )
    with Server(config, ignores_sigint=True) as server:
        yield Protocols(server.wait_ready(), grpc_port, json.loads((demo_bundle / "example.json").read_bytes()))


def test_a_second_instance_runs_beside_the_first_and_sigint_does_not_end_what_nohup_started(
    server: Server, served: Protocols, example: bytes
) -> None:
    assert len(served.server.states()) == 1
    assert score(served.url, example).json()["scores"] == score(server.url, example).json()["scores"]
    os.killpg(served.server.process.pid, signal.SIGINT)
    assert score(served.url, example).status_code == 200


def inputs(kind: Any, served: Protocols) -> list[Any]:
    metadata = httpx.get(f"{served.url}/v2/models/demo").json()
    datatypes = {i["name"]: i["datatype"] for i in metadata["inputs"]}
    out = []
    for name, column in [*served.example["candidates"].items(), *((k, [v]) for k, v in served.example["context"].items())]:
        dtype: Any = {"BYTES": object, "FP32": np.float32, "INT64": np.int64}[datatypes[name]]
        missing = np.array([value is None for value in column])
        filled = [value if value is not None else "" if dtype is object else 0 for value in column]
        values = np.array([v.encode() if dtype is object else v for v in filled], dtype)
        out.append(kind.InferInput(name, list(values.shape), datatypes[name]))
        out[-1].set_data_from_numpy(values)
        if missing.any():
            out.append(kind.InferInput(f"{name}:missing", list(missing.shape), "BOOL"))
            out[-1].set_data_from_numpy(missing)
    return out


def test_tritonclient_over_both_gives_the_scores_of_v1(served: Protocols) -> None:
    http = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    rpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    with http.InferenceServerClient(f"127.0.0.1:{served.server.port}") as client:
        assert client.is_server_ready()
        result = client.infer("demo", inputs(http, served), request_compression_algorithm="gzip")
        assert np.array_equal(result.as_numpy("scores"), served.scores)
    with rpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        assert client.is_server_ready()
        assert client.is_model_ready("demo")
        assert np.array_equal(client.infer("demo", inputs(rpc, served)).as_numpy("scores"), served.scores)
        [stats] = client.get_inference_statistics("demo", as_json=True)["model_stats"]
        assert int(stats["inference_count"]) >= len(served.scores)


def test_the_client_gives_the_scores_of_v1(served: Protocols) -> None:
    with Client(served.url, "demo") as client:
        assert np.array_equal(client.score(served.example["candidates"], served.example["context"]), served.scores)


def test_grpc_errors_keep_their_status_and_words_behind_the_proxy(served: Protocols) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        cases = [
            (b"\xff", grpc.StatusCode.INVALID_ARGUMENT, "message: got 1 bytes that are none, expected a ModelInferRequest"),
            (CLASSES["ModelInferRequest"](model_name="x").SerializeToString(), grpc.StatusCode.NOT_FOUND, "model: got 'x'"),
            (bytes(2 * LIMIT_BYTES), grpc.StatusCode.RESOURCE_EXHAUSTED, ""),
        ]
        for message, code, words in cases:
            with pytest.raises(grpc.RpcError) as caught:
                infer(message, timeout=20)
            assert caught.value.code() == code
            assert caught.value.details().startswith(words)


def test_grpc_clients_connect_on_loopback_and_replicas_turn_away_who_is_elsewhere(served: Protocols) -> None:
    assert {(address, port) for address, port in listeners() if port == served.grpc_port} == {("127.0.0.1", served.grpc_port)}
    [outer] = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"} or {None}
    if outer is None or outer.startswith("127."):
        pytest.skip("this host has no address but loopback")
    replies = [_code_at(f"{outer}:{port}") for port in _replica_ports(served.server)]
    assert grpc.StatusCode.PERMISSION_DENIED in replies
    assert None not in replies


def _replica_ports(server: Server) -> list[int]:
    """Of the replica's gRPC server, and whatever else listens on every interface of IPv6."""
    lines = Path("/proc/net/tcp6").read_text().splitlines()[1:]
    ports = [int(line.split()[1].split(":")[1], 16) for line in lines if line.split()[3] == "0A"]
    return [port for port in ports if 20_000 <= port < 32_100]


def _code_at(target: str) -> grpc.StatusCode | None:
    with grpc.insecure_channel(target) as channel:
        try:
            channel.unary_unary(f"/{SERVICE}/ServerLive")(b"", timeout=20)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return None


def test_sigterm_twice_under_load_gives_every_grpc_call_its_scores_or_unavailable_and_leaves_no_process_and_no_file(
    server: Server, served: Protocols
) -> None:
    """The last test of the second one. A call may cross HAProxy's GOAWAY on its way, and is told UNAVAILABLE: send it again."""
    rpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    logging.getLogger("grpc").setLevel(logging.ERROR)
    outcomes: list[str] = []
    sent = inputs(rpc, served)

    def client() -> None:
        while True:
            with rpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as one:
                try:
                    result = one.infer("demo", sent)
                except Exception as error:
                    outcomes.append(str(error))
                    return
                outcomes.append("scored" if np.array_equal(result.as_numpy("scores"), served.scores) else "wrong")

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    while outcomes.count("scored") < 40 and any(thread.is_alive() for thread in clients):
        time.sleep(0.001)
    os.killpg(served.server.process.pid, signal.SIGTERM)
    served.server.wait_for("Stopping")
    assert served.server.stop(signal.SIGTERM, alone=True) == 0, served.server.output
    for thread in clients:
        thread.join(30)
    assert [outcome for outcome in outcomes if outcome != "scored" and "UNAVAILABLE" not in outcome] == []
    assert "Traceback" not in served.server.output
    assert served.server.states() == []
    assert served.server.processes() == {}
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url)
    assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_ctrl_c_under_load_loses_no_request(server: Server, example: bytes) -> None:
    """The last test of this server."""
    outcomes = outcomes_of_ctrl_c_under_load(server, example)
    assert outcomes.keys() == {"scored", "late"}, outcomes
    assert outcomes["late"] == 2
    assert "Traceback" not in server.output


def listeners() -> set[tuple[str, int]]:
    """(address, port) of all listening IPv4 sockets of this host."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            address, port = local.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def pid_of(name: str, server: Server) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == server.process.pid and (folder / "comm").read_text().strip() == name:
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"no process {name} in the server's session")
