"""Suite `autoscaling`: a running service under an offered load that rises and falls, and how its replicas follow.

One record a phase: what clients saw, and the replicas over time, counted as processes of the service.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records.record import Record, record
from benchmarks.serving.load import drive, request_bytes
from benchmarks.serving.payloads import Payloads
from benchmarks.serving.systems import Running, first_answer, our_server, processes_of_session, settle
from dpiframe_core.bundle.bundle import read_bundle

_SAMPLE_S = 0.25
_CONNECTIONS = 64
_PATH = "/v2/models/demo/infer"


@dataclass(frozen=True)
class Plan:
    """What to run. `rates`: requests a second offered low and high; one of 0: found from what one replica can do."""

    bundle: Path
    device: str
    topology: str
    most: int
    ingress: int
    candidates: int
    rates: Sequence[float]
    target_busy: float
    seconds: float
    down_after_s: float
    load_processes: int
    seed: int

    @property
    def config(self) -> dict[str, Any]:
        """The deployment: one replica at first, and a policy with short periods."""
        policy = {"max_replicas": self.most, "target_busy": self.target_busy, "look_back_s": 2.0, "up_after_s": 2.0,
                  "down_after_s": self.down_after_s}  # fmt: skip
        models = [{"path": str(self.bundle.absolute()), "name": "demo"}]
        config = {"models": models, "device": self.device, "topology": self.topology, "autoscaling": policy}
        return config | ({"ingress_replicas": self.ingress} if self.topology == "fanin" else {})


def run(plan: Plan, said: Callable[[str], None]) -> Iterator[Record]:
    """Yields a record a phase: low, high, low again."""
    headers, bodies = Payloads.draw(read_bundle(plan.bundle), plan.candidates, plan.seed).bodies("binary")
    with our_server(plan.config) as server:
        first_answer(server, _PATH, headers, bodies[0])
        settle(server)
        requests = [request_bytes(server.port, _PATH, body, headers) for body in bodies]
        common = {"connections": _CONNECTIONS, "processes": plan.load_processes, "seed": plan.seed}
        rates = list(plan.rates)
        if len(rates) < 2:
            alone = drive(server.port, requests, seconds=1, **common).requests_per_s
            rates = [0.1 * alone, 0.6 * alone]  # the second is twice what the policy lets one replica do
            said(f"one replica: {alone:.0f} requests/s; waiting for the service to settle")
            time.sleep(2 * plan.down_after_s)
        for phase, rate in (("low", rates[0]), ("high", rates[1]), ("low again", rates[0])):
            with _counted(server, "Engine" if plan.topology == "fanin" else "Replica") as replicas:
                load = drive(server.port, requests, seconds=plan.seconds, rate=rate, warm_s=0, **common)
            cell = {"phase": phase, "rate": round(rate), "most": plan.most, "target_busy": plan.target_busy}
            yield record(
                "autoscaling", f"dpiframe-{plan.topology}", model="demo", batch=plan.candidates, cell=cell, times=load.times,
                rows_per_s=load.requests_per_s * plan.candidates, requests_per_s=round(load.requests_per_s, 1),
                failed=load.failed, reconnects=load.reconnects, replicas=replicas,
            )  # fmt: skip
            said(f"{phase}: replicas {course(replicas)}; failed {load.failed or 'none'}")


def course(replicas: Sequence[Sequence[float]]) -> str:
    """(seconds, replicas) in words."""
    return ", ".join(f"{count} from {at:.0f} s" for at, count in replicas)


@contextmanager
def _counted(server: Running, deployment: str) -> Iterator[list[tuple[float, int]]]:
    """(seconds, replicas) whenever their number changes."""
    changes: list[tuple[float, int]] = []
    done = threading.Event()
    begin = time.monotonic()

    def sample() -> None:
        while not done.is_set():
            count = replicas_of(server.process.pid, deployment)
            if not changes or changes[-1][1] != count:
                changes.append((round(time.monotonic() - begin, 2), count))
            done.wait(_SAMPLE_S)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield changes
    finally:
        done.set()
        thread.join()


def replicas_of(session: int, deployment: str) -> int:
    """Processes of that session which are replicas: Ray names them so."""
    return sum(f"ServeReplica:dpiframe:{deployment}" in title for _, title in processes_of_session(session))
