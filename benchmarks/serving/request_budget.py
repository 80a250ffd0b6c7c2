"""What a request costs: CPU microseconds of each of our processes and of HAProxy under load, user and system time apart.

The same server answers on both ways, by HAProxy and on the direct port. Times are the kernel's own of each process, in ticks of
10 ms, so a load of seconds tells a microsecond a request. The load generator's own time is not counted.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.host_cores import stolen_share
from benchmarks.records.record import Record, record
from benchmarks.serving.load import Load, drive, request_bytes
from benchmarks.serving.payloads import Payloads, scores_in
from benchmarks.serving.systems import Running, first_answer, our_config, our_server, processes_of_session, settle
from deployments.serve.host import free_ports
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.options import GOLDEN_TOLERANCE

PARTS = ("haproxy", "ingress", "engine", "replica", "rest")  # a replica is ingress and engine in one; the rest is Ray
_NAMES = {
    "ingress": "ServeReplica:dpiframe:Ingress", "engine": "ServeReplica:dpiframe:Engine",
    "replica": "ServeReplica:dpiframe:Replica", "haproxy": "haproxy",
}  # fmt: skip
_PATHS = {"binary": "/v2/models/demo/infer", "bytes": "/v2/models/demo/infer"}


@dataclass(frozen=True)
class Plan:
    """What to measure. offered: open loop, shares of the best closed-loop rate of each way. system: as in suite `serving`."""

    bundle: Path
    device: str
    precision: str
    system: str
    ingress: int
    forms: Sequence[str]
    candidates: Sequence[int]
    connections: Sequence[int]
    offered: Sequence[float]
    ways: Sequence[str]
    load_processes: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class Asked:
    """Requests of one form and size for one way into a service whose first answers are right, within `worst`."""

    form: str
    rows: int
    way: str
    at: Running
    requests: list[bytes]
    worst: float


def asked(plan: Plan, server: Running, direct: int) -> Iterator[Asked]:
    """What to load a service with, one after the other. Raises AssertionError where its scores are wrong."""
    bundle = read_bundle(plan.bundle)
    ports = {"haproxy": server.port, "direct": direct}
    for rows in plan.candidates:
        payload = Payloads.draw(bundle, rows, plan.seed)
        for form in plan.forms:
            headers, bodies = payload.bodies(form)
            path = _PATHS.get(form, "/v1/score")
            for way in plan.ways:
                at = Running(server.process, ports[way], server.said)
                worst = 0.0
                for body, expected in list(zip(bodies, payload.scores, strict=True))[:4]:
                    scores = scores_in(first_answer(at, path, headers, body), form)
                    worst = max(worst, float(np.abs(scores - expected).max()))
                if not worst <= GOLDEN_TOLERANCE[plan.precision]:
                    raise AssertionError(f"{way} {form}: got scores off by {worst}")
                yield Asked(form, rows, way, at, [request_bytes(at.port, path, body, headers) for body in bodies], worst)


def run(plan: Plan, said: Callable[[str], None]) -> Iterator[Record]:
    """Yields a record a way, form, number of candidates and load. cpu_us: user and system microseconds a request, by part."""
    (direct,) = free_ports(1)
    config = our_config(plan.system, plan.bundle, plan.device, 1, plan.ingress) | {"http": {"direct_port": direct}}
    with our_server(config) as server:
        for ask in asked(plan, server, direct):
            best = 0.0
            loads = [(connections, 0.0) for connections in plan.connections]
            for connections, share in [*loads, *((0, share) for share in plan.offered)]:
                open_ = max(64, 2 * max(plan.connections)) if share else connections
                if not share:
                    settle(ask.at)
                load, cpu_us, stolen = measured(plan, ask, open_, share * best)
                best = best if share else max(best, load.requests_per_s)
                total = sum(map(sum, cpu_us.values()))
                slowest = " ".join(f"{ms:.0f}" for ms in load.slow_ms)
                said(
                    f"{ask.way} {ask.form} {ask.rows} x{open_} {share or ''}: {load.requests_per_s:.0f}/s, "
                    f"p50 {load.times.p50_us:.0f}, p99 {load.times.p99_us:.0f}, p99.9 {load.p999_us:.0f} us, "
                    f"unsent p99 {load.unsent_p99_us:.0f} us, slowest at {slowest} ms; "
                    f"CPU {total:.0f} us {cpu_us}, stolen {stolen:.1%}"
                )
                cell = {"form": ask.form, "way": ask.way, "connections": open_, "offered": share, "ingress": plan.ingress}
                yield record(
                    "request_budget", plan.system, model="demo", batch=ask.rows, times=load.times, max_abs_err=ask.worst,
                    cell=cell, rows_per_s=load.requests_per_s * ask.rows, requests_per_s=round(load.requests_per_s, 1),
                    cpu_us=cpu_us, p999_us=round(load.p999_us, 1), failed=load.failed,
                    body_bytes=len(ask.requests[0].partition(b"\r\n\r\n")[2]),
                    load_limited=load.limited, load_late_p99_us=load.late_p99_us,
                    load_unsent_p99_us=round(load.unsent_p99_us, 1), slow_ms=[round(ms, 1) for ms in load.slow_ms],
                    stolen=round(stolen, 4),
                )  # fmt: skip


def measured(plan: Plan, ask: Asked, connections: int, rate: float) -> tuple[Load, dict[str, tuple[float, float]], float]:
    """What clients saw, user and system microseconds a request by part, and the share of the CPU time of all that ran which the
    host did not give."""
    before = _cpu_ticks(ask.at)
    with stolen_share() as stolen:
        load = drive(
            ask.at.port, ask.requests, connections=connections, seconds=plan.seconds, rate=rate,
            processes=plan.load_processes, seed=plan.seed,
        )  # fmt: skip
    after = _cpu_ticks(ask.at)
    us = 1e6 / os.sysconf("SC_CLK_TCK") / load.answered
    spent = {part: [b - a for a, b in zip(before[part], after[part], strict=True)] for part in PARTS}
    cpu_us = {part: (round(user * us, 1), round(system * us, 1)) for part, (user, system) in spent.items()}
    return load, cpu_us, stolen[0]


def parts_of(server: Running) -> dict[int, str]:
    """The process ids of a server, and the part that each is of."""
    running = processes_of_session(server.process.pid)
    return {pid: next((part for part, said in _NAMES.items() if said in title), "rest") for pid, title in running}


def _cpu_ticks(server: Running) -> dict[str, list[int]]:
    """User and system time of the server's processes so far, by part."""
    ticks = {part: [0, 0] for part in PARTS}
    for pid, part in parts_of(server).items():
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks[part][0] += int(fields[11])
            ticks[part][1] += int(fields[12])
    return ticks
