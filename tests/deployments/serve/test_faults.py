"""Two replicas behind HAProxy while one after the other of the service's processes dies or hangs, under our client's load; then
while its versions change.

What each fault costs and how soon it is over: docs/faults.md.
"""

import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.deployments.client_load import ClientLoad, wait_until
from tests.deployments.lifecycle.live_versions import change_versions, write_versions
from tests.deployments.server_process import Server

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HANG = Path(__file__).with_name("hang")


@dataclass
class Service:
    server: Server
    folder: Path
    hang: Path
    example: dict[str, Any]
    wanted: np.ndarray[Any, Any]

    def pids(self, part: str) -> set[int]:
        return {pid for pid, command in self.server.processes().items() if part in command}

    @property
    def replicas(self) -> set[int]:
        return self.pids("ServeReplica:dpiframe:Replica")

    def load(self) -> ClientLoad:
        return ClientLoad(self.server.url, self.example, self.wanted)

    def serve_from_both(self) -> None:
        """Until two replicas run that HAProxy sends requests to."""
        wait_until(lambda: len(self.replicas) == 2)
        wait_until(lambda: self.batches_differ() or self.batches_differ())

    def batches_differ(self) -> bool:
        """Whether two replicas tell of different batches, once one of them had one more."""
        httpx.post(f"{self.server.url}/v1/score", json=self.example)
        return len({httpx.get(f"{self.server.url}/v1/batch-sizes").text for _ in range(8)}) > 1

    def logged(self, text: str) -> bool:
        (state,) = self.server.states()
        return any(text in file.read_text() for file in state.glob("ray/session_latest/logs/worker-*.err"))


@pytest.fixture(scope="module")
def service(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from dpiframe_core.engine.engine import Engine

    example = json.loads((demo_bundle / "example.json").read_bytes())
    engine = Engine.load(demo_bundle, "cpu")
    engine.warmup()
    wanted = engine.score(example["candidates"], example["context"])[:, 0]
    engine.close()
    folder = tmp_path_factory.mktemp("faults")
    write_versions(demo_bundle, folder)
    config = {
        "models": [{"path": str(folder / "demo-1")}], "models_root": str(folder), "models_state": str(folder / "state.json"),
        "replicas": 2, "cpus_per_replica": 0.5, "batching": {"max_run_s": 4}, "topology": "colocated",
    }  # fmt: skip
    (folder / "two.yaml").write_text(json.dumps(config))
    paths = os.pathsep.join(filter(None, [str(HANG), os.environ.get("PYTHONPATH")]))
    with Server(folder / "two.yaml", environment={"PYTHONPATH": paths, "DPIFRAME_TEST_HANG": str(folder / "hang")}) as server:
        yield Service(server.wait_ready(), folder, folder / "hang", example, wanted)


def test_a_replica_that_is_killed_costs_what_it_had_and_our_client_asks_again(service: Service) -> None:
    service.serve_from_both()
    with service.load() as load:
        killed = min(service.replicas)
        os.kill(killed, signal.SIGKILL)
        load.go_on(100)
        wait_until(lambda: len(service.replicas - {killed}) == 2)
        load.go_on()
    print(f"met {load.met}")
    assert (load.failed, load.wrong) == ({}, 0)
    assert load.lost <= load.clients


def test_a_replica_whose_device_hangs_ends_itself_and_is_replaced(service: Service) -> None:
    service.serve_from_both()
    with service.load() as load:
        hung = min(service.replicas)
        service.hang.write_text(str(hung))
        took = wait_until(lambda: hung not in service.replicas)
        service.hang.unlink()
        wait_until(lambda: len(service.replicas) == 2)
        load.go_on()
    print(f"met {load.met}, ended after {took:.1f} s")
    assert (load.failed, load.wrong) == ({}, 0)
    # 500: HAProxy's own, of a connection that ended (docs/errors.md). One of ours, which is not tried again, would have failed.
    assert load.met.keys() <= {"200", "500", "503", "RemoteProtocolError", "ReadError", "ConnectError"}
    assert load.lost <= 10 * load.clients  # it refuses at once until it is gone, so HAProxy sends it most
    why = "device: got a run that has lasted 4 s, expected its end (batching.max_run_s): this process ends"
    assert service.logged(why)
    assert service.logged("in hanging")  # where it hung


def test_clients_that_stall_reset_or_send_garbage_harm_nobody(service: Service) -> None:
    service.serve_from_both()
    head = b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    rng = random.Random(1)
    stalled = []
    with service.load() as load:
        for _ in range(40):
            for sent in (head + b'{"candidates"', rng.randbytes(300), head[: rng.randrange(len(head))]):
                rude = socket.create_connection(("127.0.0.1", service.server.port), timeout=30)
                rude.sendall(sent)
                stalled.append(rude)
                if rng.random() < 0.8:  # a reset, in the place of an orderly end
                    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    stalled.pop().close()
        load.go_on(100)
        for rude in stalled:
            rude.close()
        load.go_on()
    print(f"met {load.met}, {len(stalled)} stalled")
    assert (load.failed, load.wrong, load.lost) == ({}, 0, 0)
    assert len(service.replicas) == 2


def test_without_the_serve_controller_requests_are_answered_as_before_and_ray_starts_another_one(service: Service) -> None:
    service.serve_from_both()
    (controller,) = service.pids("ServeController")
    replicas = service.replicas
    with service.load() as load:
        os.kill(controller, signal.SIGKILL)
        load.go_on(100)
        wait_until(lambda: bool(service.pids("ServeController") - {controller}))
        time.sleep(2)  # it takes up the replicas that there are
        load.go_on()
    print(f"met {load.met}")
    assert (load.failed, load.wrong, load.lost) == ({}, 0, 0)
    assert service.replicas == replicas


def test_a_haproxy_that_is_killed_comes_back(service: Service) -> None:
    service.serve_from_both()
    proxies = service.pids("haproxy -")
    assert proxies
    for proxy in proxies:
        os.kill(proxy, signal.SIGKILL)
    begun = time.monotonic()

    def answers() -> bool:
        try:
            return httpx.get(f"{service.server.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers)
    print(f"back after {time.monotonic() - begun:.1f} s")
    assert service.pids("haproxy -").isdisjoint(proxies)
    with service.load() as load:
        load.go_on()
    assert (load.failed, load.wrong) == ({}, 0)


def test_versions_change_under_load_without_a_failed_request(service: Service) -> None:
    """The last test of this service, which has another version then."""
    service.serve_from_both()
    change_versions(service.server, service.folder / "two.yaml", service.folder)
