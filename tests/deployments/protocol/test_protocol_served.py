"""The protocol through the real thing: Ray Serve's HTTP and gRPC ingress, both behind HAProxy."""

import json
import logging
import signal
import socket
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
from tests.deployments.serve.test_launcher import listeners
from tests.deployments.server_process import Server

LIMIT_BYTES = 1_000_000


class Protocols:
    def __init__(self, server: Server, grpc_port: int, example: dict[str, Any]) -> None:
        self.server, self.grpc_port, self.example = server, grpc_port, example
        self.url = server.url
        answer = httpx.post(f"{server.url}/v1/score", json=example, timeout=30)
        self.scores = np.float32(answer.json()["scores"])[:, None]


@pytest.fixture(scope="module")
def served(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protocols]:
    grpc_port = own_port()
    config = tmp_path_factory.mktemp("config") / "grpc.yaml"
    config.write_text(
        f"models: [{{path: {demo_bundle}}}]\ngrpc: {{port: {grpc_port}}}\nlimits: {{max_body_bytes: {LIMIT_BYTES}}}\n"
    )
    with Server(config) as server:
        yield Protocols(server.wait_ready(), grpc_port, json.loads((demo_bundle / "example.json").read_bytes()))


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


@pytest.mark.ray
@pytest.mark.slow
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


@pytest.mark.ray
@pytest.mark.slow
def test_the_client_gives_the_scores_of_v1(served: Protocols) -> None:
    with Client(served.url, "demo") as client:
        assert np.array_equal(client.score(served.example["candidates"], served.example["context"]), served.scores)


@pytest.mark.ray
@pytest.mark.slow
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


@pytest.mark.ray
@pytest.mark.slow
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


@pytest.mark.ray
@pytest.mark.slow
def test_sigterm_under_load_gives_every_grpc_call_its_scores_or_unavailable(served: Protocols) -> None:
    """The last test of this server. A call may cross HAProxy's GOAWAY on its way, and is told UNAVAILABLE: send it again."""
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
    assert served.server.stop(signal.SIGTERM) == 0
    for thread in clients:
        thread.join(30)
    assert [outcome for outcome in outcomes if outcome != "scored" and "UNAVAILABLE" not in outcome] == []
