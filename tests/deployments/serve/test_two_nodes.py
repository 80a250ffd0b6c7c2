"""A fan-in over two nodes of a Ray cluster: who stands where, and what a death, a cut network or an update takes along."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests import run_guard
from tests.deployments.client_load import ClientLoad, wait_until
from tests.deployments.server_process import Server

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
models: [{{path: {bundle}}}]
models_root: {root}
topology: fanin
nodes: 2
replicas: 2
ingress_replicas: 2
drain_s: 5
limits: {{max_rows_per_request: {rows}}}
"""


@dataclass
class Service:
    """One application on the cluster of `two_nodes`."""

    cluster: subprocess.Popen[str]
    server: Server
    config: Path
    settings: dict[str, str]
    options: tuple[str, ...]
    example: dict[str, Any]
    wanted: np.ndarray[Any, Any]

    def replicas(self, deployment: str) -> dict[int, int]:
        """Process ids of a deployment's replicas, with that of the raylet which started each."""
        return self.started(f"ServeReplica:dpiframe:{deployment}")

    @property
    def coordinator(self) -> tuple[int, int]:
        """Its process id, and that of its raylet, once it is the only one whose raylet runs."""
        running: dict[int, int] = {}

        def one() -> bool:
            running.clear()
            running.update({pid: raylet for pid, raylet in self.started("CoordinatorActor").items() if runs(raylet)})
            return len(running) == 1

        wait_until(one)
        return running.popitem()

    def add_node(self) -> None:
        assert self.cluster.stdin is not None
        self.cluster.stdin.write("\n")
        self.cluster.stdin.flush()

    def versions(self) -> dict[str, Any]:
        """What is served, once the replicas agree: a coordinator that was replaced takes a few seconds."""
        said: list[dict[str, Any]] = []

        def whole() -> bool:
            answer = httpx.get(f"{self.server.url}/v1/models/demo/versions", timeout=30)
            said.append(answer.json())
            replicas = said[-1].get("replicas", ())
            return len(replicas) >= 2 and all(replica["current"] for replica in replicas)

        try:
            wait_until(whole, 60)
        except AssertionError:
            pytest.fail(f"{said[-1]} {self.started('ServeReplica')}")
        return said[-1]

    def wait_for_nodes(self, nodes: int, versions: int) -> None:
        """Until so many nodes run, and the ingress of each is connected to its engine for so many versions."""

        def whole() -> bool:
            engines, ingresses = (
                {raylet: boards(pid) for pid, raylet in self.replicas(part).items() if runs(raylet)}
                for part in ("Engine", "Ingress")
            )
            joined = [len(own & ingresses.get(raylet, set())) for raylet, own in engines.items()]
            return joined == [versions] * nodes

        wait_until(whole)

    def started(self, what: str) -> dict[int, int]:
        """Process ids of the cluster's workers that are called so, with that of the raylet which started each."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_text()
                if os.getsid(int(folder.name)) == self.cluster.pid and what in command:
                    found[int(folder.name)] = int(re.findall(r"PPid:\t(\d+)", (folder / "status").read_text())[0])
            except OSError:  # it has just ended
                continue
        return found

    def load(self) -> ClientLoad:
        return ClientLoad(self.server.url, self.example, self.wanted)


@pytest.fixture(scope="module")
def service(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from dpiframe_core.engine.engine import Engine

    example = json.loads((demo_bundle / "example.json").read_bytes())
    engine = Engine.load(demo_bundle, "cpu")
    engine.warmup()
    wanted = engine.score(example["candidates"], example["context"])[:, 0]
    engine.close()
    state = Path(f"/tmp/dpi-two-{os.getpid()}")
    state.mkdir(mode=0o700)
    config = tmp_path_factory.mktemp("configs") / "nodes.yaml"
    config.write_text(CONFIG.format(bundle=demo_bundle, root=demo_bundle.parent, rows=8192))
    cluster = subprocess.Popen(
        [sys.executable, "-m", "tests.deployments.serve.two_nodes", str(state)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert cluster.stdout is not None
        said = json.loads(cluster.stdout.readline())
        options = ("--address", said["address"])
        with Server(config, *options, environment=said["settings"]) as server:
            server.wait_for("Serving at")
            yield Service(cluster, server, config, said["settings"], options, example, wanted)
            server.kill()
    finally:
        run_guard.kill_all(lambda: session(cluster.pid))
        cluster.communicate()
        subprocess.run(["rm", "-rf", str(state)], check=True)


def session(leader: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == leader and (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def runs(raylet: int) -> bool:
    """Whether a raylet lives, and not all of its threads were stopped. Who takes its orphans on is none."""
    folder, states = Path(f"/proc/{raylet}"), set()
    for thread in folder.glob("task/*/stat"):
        with suppress(OSError):  # it has just ended
            states.add(thread.read_text().rpartition(")")[2].split()[0])
    try:
        return b"raylet/raylet" in (folder / "cmdline").read_bytes() and not states <= {*"TZ"}
    except OSError:
        return False


def boards(pid: int) -> set[str]:
    """Inodes of the engines' boards that a process has mapped."""
    try:
        return set(re.findall(r"(\d+) +/memfd:dpiframe-board", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:  # it has just ended
        return set()


def test_each_node_has_its_share_and_each_ingress_the_engine_of_its_own_node(service: Service) -> None:
    engines, ingresses = service.replicas("Engine"), service.replicas("Ingress")
    assert len(engines) == len(ingresses) == 2
    assert len(set(engines.values())) == len(set(ingresses.values())) == 2
    assert set(engines.values()) == set(ingresses.values())
    service.wait_for_nodes(2, versions=1)
    assert boards(min(ingresses)).isdisjoint(boards(max(ingresses)))
    with service.load() as load:
        load.go_on()
    assert (load.lost, load.wrong) == (0, 0)
    assert service.coordinator[1] in engines.values()  # where the bundles are: the head may have none


def test_an_engine_that_is_killed_takes_only_its_own_requests_along_and_its_ingress_asks_the_other_node(
    service: Service,
) -> None:
    engines = service.replicas("Engine")
    killed = max(engines)
    with service.load() as load:
        os.kill(killed, signal.SIGKILL)
        load.go_on(100)
        wait_until(lambda: len(service.replicas("Engine").keys() - {killed}) == 2)
        load.go_on()
    print(f"met {load.met}, right {load.right}")
    assert (load.failed, load.wrong) == ({}, 0)
    assert load.lost <= 2 * load.clients


def test_a_rolling_update_loses_no_request(service: Service, demo_bundle: Path, tmp_path: Path) -> None:
    before = {*service.replicas("Engine"), *service.replicas("Ingress")}
    changed = tmp_path / "changed.yaml"
    changed.write_text(CONFIG.format(bundle=demo_bundle, root=demo_bundle.parent, rows=4000))
    with service.load() as load:
        with Server(changed, *service.options, environment=service.settings, port=service.server.port) as updater:
            updater.wait_for("Serving at")
            wait_until(lambda: not before & {*service.replicas("Engine"), *service.replicas("Ingress")})
            updater.kill()  # else it would delete the application at its end
        load.go_on()
    print(f"met {load.met}, right {load.right}")
    assert (load.met.keys(), load.wrong) == ({"200"}, 0), load.met


def test_a_node_that_is_cut_off_takes_only_its_own_requests_along_and_the_others_agree_on_what_they_serve(
    service: Service, demo_bundle: Path
) -> None:
    """It has the coordinator. Its replicas live, and serve for as long as HAProxy sends them requests."""
    put = httpx.put(f"{service.server.url}/v1/models/demo/versions/put", json={"path": demo_bundle.name}, timeout=60)
    assert put.status_code == 200, put.text
    coordinator, raylet = service.coordinator
    with service.load() as load:
        os.kill(raylet, signal.SIGSTOP)
        wait_until(lambda: not runs(raylet))  # a moment later: else its replicas count, and nobody waits until it is given up
        service.add_node()
        took = wait_until(lambda: sum(map(runs, service.replicas("Engine").values())) == 2)
        wait_until(lambda: sum(map(runs, service.replicas("Ingress").values())) == 2)
        load.go_on(100)
        os.kill(raylet, signal.SIGCONT)
        wait_until(lambda: not runs(raylet))  # it hears that it was given up, and ends
        load.go_on(50)
    print(f"met {load.met}, right {load.right}, replaced after {took:.1f} s")
    assert (load.failed, load.wrong) == ({}, 0)
    assert load.lost <= 2 * load.clients
    assert service.coordinator[0] != coordinator
    assert service.versions()["live"] == "put"


def test_a_node_that_is_gone_takes_only_its_own_requests_along(service: Service) -> None:
    """What Ray leaves behind there ends by itself, when nobody asks it any more."""
    service.wait_for_nodes(2, versions=2)  # the one that has replaced the node of the last test is there
    _, killed = service.coordinator
    raylets = {*filter(runs, service.replicas("Engine").values())} - {killed}
    with service.load() as load:
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: killed not in service.replicas("Engine").values())
        load.go_on(100)
        wait_until(lambda: not {*service.replicas("Engine").values(), *service.replicas("Ingress").values()} - raylets)
        load.go_on(50)
    print(f"met {load.met}, right {load.right}")
    assert (load.failed, load.wrong) == ({}, 0)
    assert load.lost <= 2 * load.clients
    assert httpx.get(f"{service.server.url}/readyz").status_code == 200
    assert service.coordinator[1] != killed
    assert service.versions()["live"] == "put"


def test_without_the_head_the_nodes_answer_on_and_agree_on_what_they_serve(service: Service) -> None:
    """Its raylet first, which takes the Serve controller along, then its control service. HAProxy, which lies there under our
    launcher, outlives both. The last test of this service.
    """

    def rolled_back() -> str:
        answer = httpx.post(f"{service.server.url}/v1/models/demo/rollback", timeout=30)
        assert answer.status_code == 200, answer.text
        live: str = answer.json()["live"]
        return live

    (head,) = (pid for pid in service.started("raylet/raylet") if b"--head" in Path(f"/proc/{pid}/cmdline").read_bytes())
    service.wait_for_nodes(1, versions=2)
    with service.load() as load:
        os.kill(head, signal.SIGKILL)
        wait_until(lambda: not service.started("ServeController"))
        load.go_on(50)
        before = rolled_back()
        (control,) = service.started("gcs_server")
        os.kill(control, signal.SIGKILL)
        load.go_on(50)
        assert (rolled_back(), before != "put") == ("put", True)
        time.sleep(2)
        load.go_on(50)
    print(f"met {load.met}, right {load.right}")
    assert (load.failed, load.wrong) == ({}, 0)
    assert load.lost <= 2 * load.clients  # what processes of the head had in hand (docs/faults.md)
