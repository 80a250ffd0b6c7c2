"""Suite `stalls`: what the slowest requests wait for. The same offered load, with and without what goes on beside it.

One service, one after the other at each share of its highest rate: as it is; with Python's collector off in all that serve;
with Ray's own processes stopped; with the load generator before all others on its core; with a replica more that starts (of
ingresses in a fan-in), as autoscaling adds one; and, by HAProxy, with a reload each second, as a rollout makes one.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.host_cores import stolen_share
from benchmarks.records.record import Record, record
from benchmarks.serving.load import Load, drive, request_bytes
from benchmarks.serving.payloads import Payloads, scores_in
from benchmarks.serving.scaling import replicas_of
from benchmarks.serving.systems import Running, first_answer, our_config, our_server, processes_of_session, settle
from deployments.serve.host import free_ports
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.options import GOLDEN_TOLERANCE

_LOAD_AHEAD = "load ahead"
BESIDE = ("as it is", "no collector", "no Ray", "a replica more", "reloads")
_RAYS = ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::ServeController")
_PATH = "/v2/models/demo/infer"
_RELOAD_S = 1.0
_SHARE = 0.25
_STARTS_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        offered: shares of the highest closed-loop rate. beside: of `BESIDE`.
        turns: how often each, all in turn; the middle one is kept.
    """

    bundle: Path
    device: str
    precision: str
    system: str
    ingress: int
    candidates: int
    connections: int
    offered: Sequence[float]
    ways: Sequence[str]
    beside: Sequence[str]
    turns: int
    load_processes: int
    seconds: float
    seed: int


def known(names: Sequence[str]) -> Sequence[str]:
    """Those, or all that every host can do. Raises ValueError for another name."""
    for name in names:
        if name not in (*BESIDE, _LOAD_AHEAD):
            raise ValueError(f"beside: got {name!r}, expected some of {[*BESIDE, _LOAD_AHEAD]}")
    return names or BESIDE


def run(plan: Plan, said: Callable[[str], None]) -> Iterator[Record]:
    """Yields a record a way, share and what is beside it: of `turns`, the one with the middle p99; p99_turns_us has all."""
    payload = Payloads.draw(read_bundle(plan.bundle), plan.candidates, plan.seed)
    headers, bodies = payload.bodies("binary")
    (direct,) = free_ports(1)
    config = our_config(plan.system, plan.bundle, plan.device, 1, plan.ingress) | {"http": {"direct_port": direct}}
    if plan.system == "dpiframe-fanin":
        config["cpus_per_ingress"] = _SHARE  # so that Ray finds room for another
    with our_server(config) as server, ExitStack() as stack:
        ports = {"haproxy": server.port, "direct": direct}
        first_answer(server, _PATH, headers, bodies[0])
        side = stack.enter_context(_ray_side(server.process.pid))
        for way in plan.ways:
            at = Running(server.process, ports[way], server.said)
            scores = scores_in(first_answer(at, _PATH, headers, bodies[0]), "binary")
            worst = float(np.abs(scores - payload.scores[0]).max())
            if not worst <= GOLDEN_TOLERANCE[plan.precision]:
                raise AssertionError(f"{way}: got scores off by {worst}")
            requests = [request_bytes(at.port, _PATH, body, headers) for body in bodies]
            common = {"connections": plan.connections, "processes": plan.load_processes, "seed": plan.seed}
            settle(server)
            best = drive(at.port, requests, seconds=plan.seconds, **common).requests_per_s
            said(f"{way}: {best:.0f} requests/s at most")
            for share in plan.offered:
                seen: dict[str, list[tuple[Load, float]]] = {
                    name: [] for name in plan.beside if way == "haproxy" or name != "reloads"
                }
                for _ in range(plan.turns):
                    for name, loads in seen.items():
                        with _beside(name, plan.system, server.process.pid, side), stolen_share() as stolen:
                            ahead = name == _LOAD_AHEAD
                            load = drive(at.port, requests, seconds=plan.seconds, rate=share * best, ahead=ahead, **common)
                        loads.append((load, stolen[0]))
                for name, loads in seen.items():
                    by_p99 = sorted(loads, key=lambda pair: pair[0].times.p99_us)
                    load, lost = by_p99[len(by_p99) // 2]
                    said(
                        f"{way} {share:.0%} {name}: p50 {load.times.p50_us:.0f}, p99 {load.times.p99_us:.0f}, "
                        f"p99.9 {load.p999_us:.0f} us, the load's own {load.late_p99_us:.0f}, "
                        f"failed {load.failed or 'none'}, stolen {lost:.1%}"
                    )
                    yield record(
                        "stalls", plan.system, model="demo", batch=plan.candidates, times=load.times, max_abs_err=worst,
                        cell={"way": way, "offered": share, "beside": name, "ingress": plan.ingress},
                        requests_per_s=round(load.requests_per_s, 1), rows_per_s=load.requests_per_s * plan.candidates,
                        p999_us=round(load.p999_us, 1), p99_turns_us=[round(one.times.p99_us, 1) for one, _ in by_p99],
                        failed=load.failed, reconnects=load.reconnects, load_limited=load.limited,
                        load_late_p99_us=round(load.late_p99_us, 1), slow_ms=[round(ms, 1) for ms in load.slow_ms],
                        stolen=round(lost, 4),
                    )  # fmt: skip


@contextmanager
def _beside(name: str, system: str, session: int, side: Callable[[str], None]) -> Iterator[None]:
    match name:
        case "no collector":
            side("collector off")
            try:
                yield
            finally:
                side("collector on")
        case "no Ray":
            stopped = [pid for pid, command in processes_of_session(session) if any(ray in command for ray in _RAYS)]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            try:
                yield
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
        case "a replica more":
            deployment = "Ingress" if system == "dpiframe-fanin" else "Replica"
            before = replicas_of(session, deployment)
            side(f"replicas {deployment} 1")
            try:
                yield
                _until(lambda: replicas_of(session, deployment) > before, "a replica more")
            finally:
                side(f"replicas {deployment} -1")
                _until(lambda: replicas_of(session, deployment) == before, "the replicas from before")
        case "reloads":
            done = threading.Event()

            def reload() -> int:
                count = 0
                while not done.wait(_RELOAD_S):
                    side("reload")
                    count += 1
                return count

            before = _proxies(session)
            with ThreadPoolExecutor(1) as pool:
                reloads = pool.submit(reload)
                try:
                    yield
                finally:
                    done.set()
            if not reloads.result() or _proxies(session) <= before:
                raise RuntimeError("reloads: got the same HAProxy after all of them, expected another process each second")
        case _:
            yield


def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _STARTS_S
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"autoscaling: got no change in {_STARTS_S:.0f} s, expected {what}")
        time.sleep(0.1)


def _proxies(session: int) -> set[int]:
    return {pid for pid, command in processes_of_session(session) if command.endswith("haproxy")}


@contextmanager
def _ray_side(session: int) -> Iterator[Callable[[str], None]]:
    """`ray_side` joined to the service's private cluster: what is called with a command returns once that is done."""
    (state,) = Path("/tmp").glob(f"dpi-{session}-*")
    (raylet,) = [pid for pid, command in processes_of_session(session) if command.endswith("raylet")]
    given = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
    (address,) = [argument.partition("=")[2] for argument in given if argument.startswith("--gcs-address=")]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(state / "token")}
    command = [sys.executable, "-m", "benchmarks.serving.stalls.ray_side", address]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | token, start_new_session=True
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def told(command: str) -> None:
        print(command, file=process.stdin, flush=True)
        if process.stdout.readline().strip() != "done":
            raise RuntimeError(f"ray_side: got no answer to {command!r}, expected done")

    try:
        told("look")
        yield told
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STARTS_S)
        process.kill()
        process.wait()
