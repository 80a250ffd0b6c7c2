"""Versions of a service's model that change under load, as its users change them; no request fails."""

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from tests.deployments.lifecycle.versions import moved, write_moved
from tests.deployments.server_process import Server

T = TypeVar("T")

MODEL = "/v1/models/demo"
MOVED = {"1": 0.0, "2": 0.5, "3": -0.5}


def write_versions(demo_bundle: Path, folder: Path) -> None:
    """Versions 1, 2 and 3 of the demo's model, and `bad`, whose golden rows do not come out."""
    for version, by in MOVED.items():
        write_moved(demo_bundle, folder / f"demo-{version}", version, by)
    write_moved(demo_bundle, folder / "demo-bad", "bad", 1.0, sound=False)


class Load:
    """Clients that ask without a pause.

    `seen`: answers by version to what was asked since `until` was last called, each proven to hold that version's scores.
    """

    def __init__(self, url: str, example: bytes) -> None:
        self.seen: Counter[str] = Counter()
        self.failed: list[str] = []
        self._url, self._example = url, example
        first = httpx.post(f"{url}/v1/score", content=example, headers={"content-type": "application/json"}).json()
        assert first["version"] == "1"
        self._scores = np.float32(first["scores"])

    @contextmanager
    def running(self) -> Iterator[None]:
        over = threading.Event()
        clients = [threading.Thread(target=self._ask, args=(over,), daemon=True) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            over.set()
            for client in clients:
                client.join(30)

    def _ask(self, over: threading.Event) -> None:
        with httpx.Client(timeout=30, headers={"content-type": "application/json"}) as client:
            while not over.is_set():
                seen = self.seen
                try:
                    answer = client.post(f"{self._url}/v1/score", content=self._example)
                    version = answer.json().get("version", "none")
                    wanted = moved(self._scores, MOVED.get(version, np.nan))
                    if answer.status_code == 200 and np.allclose(np.float32(answer.json()["scores"]), wanted, atol=2e-6):
                        seen[version] += 1
                    else:
                        self.failed.append(answer.text)
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))

    def until(self, true: Callable[[Counter[str]], bool]) -> None:
        """Waits for answers to what is asked from now on."""
        self.seen = Counter()
        give_up = time.monotonic() + 60
        while not true(self.seen):
            assert time.monotonic() < give_up, (self.seen, self.failed)
            time.sleep(0.01)


def change_versions(server: Server, file: Path, root: Path) -> None:
    """From version 1, by every way there is, with two replicas of each kind; `file` has the configuration, and is changed."""
    config = json.loads(file.read_text())
    load = Load(server.url, (root / "demo-1" / "example.json").read_bytes())

    def ask(method: str, where: str, /, **body: Any) -> dict[str, Any]:
        answer = httpx.request(method, server.url + MODEL + where, json=body or None, timeout=60)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def kill_coordinator() -> None:
        (coordinator,) = (pid for pid, said in server.processes().items() if "CoordinatorActor" in said)
        os.kill(coordinator, signal.SIGKILL)

    with load.running():
        cut = threading.Timer(0.2, kill_coordinator)  # in the middle of what comes next
        cut.start()
        answer = httpx.put(f"{server.url}{MODEL}/versions/2", json={"path": "demo-2"}, timeout=60)
        cut.join()
        if answer.status_code != 200:
            assert answer.status_code == 503, answer.text
            # Unavailable: Ray has not heard of the death within a second.
            what = r"coordinator of models: got Actor(Died|Unavailable)Error, expected an answer: ask again"
            assert re.fullmatch(what, answer.json()["error"]["message"])
        state = eventually(lambda: ask("PUT", "/versions/2", path="demo-2"))
        assert (state["live"], state["previous"]) == ("2", "1")
        load.until(lambda seen: seen["2"] >= 20)
        answer = httpx.put(f"{server.url}{MODEL}/versions/bad", json={"path": "demo-bad"}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "load_failed")
        assert "demo-bad: golden rows: got scores off by" in answer.json()["error"]["message"]
        ask("PUT", "/versions/3", path="demo-3", live=False)
        ask("PUT", "/canary", version="3", percent=50)
        ask("PUT", "/shadow", version="1")
        load.until(lambda seen: seen["2"] >= 20 and seen["3"] >= 20)
        kill_coordinator()
        load.until(lambda seen: sum(seen.values()) >= 20)
        state = eventually(lambda: ask("PUT", "/versions/3"))
        assert (state["live"], state["previous"], state["canary"], state["shadow"]) == ("3", "2", None, "1")

        def all_current(state: dict[str, Any]) -> None:
            current = [replica["current"] for replica in state["replicas"]]
            assert current == [True] * (4 if config["topology"] == "fanin" else 2), state

        # A replica that hears of the coordinator's death late comes back late, and no change waits for it.
        eventually(lambda: all_current(ask("GET", "/versions")))
        state = ask("POST", "/rollback")
        assert (state["live"], state["previous"]) == ("2", "3")
        all_current(state)
        load.until(lambda seen: seen["2"] >= 20)
        assert set(load.seen) == {"2"}
        # A changed configuration.
        config["models"] = [{"path": str(root / "demo-3")}, {"path": str(root / "demo-2"), "canary": {"percent": 10}}]
        file.write_text(json.dumps(config))
        server.process.send_signal(signal.SIGUSR1)
        server.wait_for("The models are those of the configuration.")
        load.until(lambda seen: seen["3"] >= 20)
        state = ask("POST", "/rollback")
        assert (state["live"], state["previous"], state["canary"]) == ("2", "3", None)
    assert load.failed == []
    assert "Traceback" not in server.output
    # A replica that starts later serves what is current.
    old = {replica["id"] for replica in state["replicas"]}
    kind = ":Ingress" if config["topology"] == "fanin" else ":Replica"
    os.kill(next(pid for pid, said in server.processes().items() if kind in said), signal.SIGKILL)

    def replaced() -> dict[str, Any]:
        state = ask("GET", "/versions")
        new = [replica for replica in state["replicas"] if replica["id"] not in old]
        assert new, state
        assert new[0]["current"], state
        return state

    state = eventually(replaced)
    with load.running():
        load.until(lambda seen: seen["2"] >= 40)
    assert set(load.seen) == {"2"}
    assert json.loads(Path(config["models_state"]).read_text())["desired"]["models"]["demo"]["live"] == "2"


def eventually(ask: Callable[[], T], within_s: float = 90) -> T:
    """The answer, once there is one: a coordinator that ends takes the calls that it has along."""
    give_up = time.monotonic() + within_s
    while True:
        try:
            return ask()
        except (AssertionError, httpx.HTTPError):
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)
