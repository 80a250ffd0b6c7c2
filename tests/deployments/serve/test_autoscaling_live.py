"""Autoscaling at work: `dpiframe serve` under load and after it, in both topologies."""

import collections
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deployments.server_process import Server, begin


@pytest.mark.ray
@pytest.mark.slow
def test_replicas_come_under_load_and_go_after_it_while_every_request_succeeds(demo_bundle: Path, tmp_path: Path) -> None:
    """Both topologies side by side: most of it is waiting."""
    with ThreadPoolExecutor() as pool, ExitStack() as services:
        ends = []
        for topology, scaled in (("colocated", "Replica"), ("fanin", "Engine")):
            server = services.enter_context(started(demo_bundle, tmp_path, topology))
            ends.append(pool.submit(scale_up_and_down, server, scaled, (demo_bundle / "example.json").read_bytes()))
        outcomes = [end.result() for end in ends]
    assert [counted.keys() for counted in outcomes] == [{"200"}, {"200"}], outcomes


def started(demo_bundle: Path, folder: Path, topology: str) -> Server:
    """As far as its Ray: the next one looks for free ports after that."""
    scaling = "{max_replicas: 2, target_busy: 0.2, look_back_s: 1, up_after_s: 1, down_after_s: 4}"
    config = f"models: [{{path: {demo_bundle}}}]\ndevice: cpu\ntopology: {topology}\nautoscaling: {scaling}\n"
    file = folder / f"{topology}.yaml"
    file.write_text(config + ("ingress_replicas: 1\n" if topology == "fanin" else ""))
    return Server(file).wait_for("Starting HAProxy")


def scale_up_and_down(server: Server, scaled: str, example: bytes) -> collections.Counter[str]:
    """What became of the requests."""
    request = json.loads(example)
    request["candidates"] = {name: column * 200 for name, column in request["candidates"].items()}
    heavy = json.dumps(request).encode()
    outcomes = collections.Counter[str]()
    loaded, done = threading.Event(), threading.Event()

    def client() -> None:
        """Each request has a connection of its own: HAProxy may close one that is kept alive when replicas come or go."""
        while not done.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            try:
                if loaded.is_set():
                    connection.request("POST", "/v1/score", heavy, {"content-type": "application/json"})
                else:  # slowly, so that some are always open at each replica: the one that goes must not cut them
                    rest = begin(connection, example)
                    done.wait(0.5)
                    connection.send(rest)
                answer = connection.getresponse()
                outcomes[f"{answer.status}" if "scores" in json.loads(answer.read()) else "no scores"] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                outcomes[repr(error)] += 1
            finally:
                connection.close()
            done.wait(0 if loaded.is_set() else 0.05)

    def replicas() -> int:
        return sum(f"ServeReplica:dpiframe:{scaled}" in command for command in server.processes().values())

    def wait_for(wanted: int, patience_s: float = 120) -> None:
        give_up = time.monotonic() + patience_s
        while replicas() != wanted:
            assert time.monotonic() < give_up, f"{replicas()} replicas, expected {wanted}; answers: {outcomes}"
            time.sleep(0.1)

    clients = [threading.Thread(target=client) for _ in range(4)]
    loaded.set()
    try:
        server.wait_ready()
        wait_for(1)
        for thread in clients:
            thread.start()
        wait_for(2)
        time.sleep(3)  # the second one serves, and then has to hand over what it has
        loaded.clear()
        wait_for(1)
    finally:
        done.set()
        for thread in clients:
            if thread.ident is not None:
                thread.join(30)
    return outcomes
