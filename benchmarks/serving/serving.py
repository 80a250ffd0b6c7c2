"""Suite `serving`: requests a second and latency of whole servers, client to client, over one model and the same requests.

Closed loop (as many clients as connections) finds what a server can do; open loop, at shares of that, what its clients feel.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.host_cores import turns_per_s
from benchmarks.records.record import Record, record
from benchmarks.serving.load import Load, drive, request_bytes
from benchmarks.serving.payloads import Payloads, scores_in
from benchmarks.serving.systems import (
    FANIN,
    FANIN_DIRECT,
    OURS,
    PEERS,
    Running,
    cpu_s,
    first_answer,
    missing,
    on_cores,
    our_config,
    our_server,
    process,
    python_of,
    settle,
)
from benchmarks.serving.wide import widened
from benchmarks.systems.cells import Failed
from deployments.serve.host import free_ports
from dpiframe_core.bundle.bundle import Bundle, read_bundle
from dpiframe_core.engine.options import GOLDEN_TOLERANCE

_BEYOND = 1.5  # times the best closed rate: at more than that, all that is seen is the backlog of the warm-up


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long. `budget_s`: nothing new is begun after so many seconds.

    Attributes:
        hidden: widths of dense layers in place of the bundle's own; none: as it is.
        offered: open loop, shares of the best closed-loop rate; rates: requests a second besides.
        gpus: replicas of ours, one after the other; peers have one worker.
        ingress: fan-in's ingress replicas for each engine.
        cores: that the server and the load have for each GPU; 0: all of the host's, however many GPUs are used.
        turns: how often each system is started and measured, all of them one after the other each time, so that what else the
            host does meanwhile meets all alike; of a closed loop's cell the middle turn is kept.
        load_processes: of the load generator. peer_python: see `python_of`.
    """

    bundle: Path
    hidden: Sequence[int]
    device: str
    precision: str
    systems: Sequence[str]
    forms: Sequence[str]
    candidates: Sequence[int]
    connections: Sequence[int]
    offered: Sequence[float]
    rates: Sequence[float]
    gpus: Sequence[int]
    ingress: int
    cores: int
    load_processes: int
    peer_python: str
    seconds: float
    budget_s: float
    seed: int
    turns: int = 1

    @property
    def model(self) -> str:
        return "-".join(["demo", *map(str, self.hidden)])


def run(plan: Plan, failed: Failed, said: Callable[[str], None]) -> Iterator[Record]:
    """Yields a record a system, form, number of candidates and load. Every server's scores are checked before it is timed.

    cpu_us: of a closed loop, CPU microseconds a request of all processes of the server, by the kernel's ticks of 10 ms.

    Where GPUs have shares of the cores, also what these cores give to loops of pure Python (`python-loops`).
    """
    for gpus in plan.gpus if plan.cores else ():
        cell = {"form": None, "gpus": gpus, "cores": gpus * plan.cores}
        with on_cores(gpus * plan.cores):
            turns = turns_per_s()
        yield record("serving", "python-loops", cell=cell, turns_per_s=turns)
    with _bundle(plan) as bundle:
        if plan.turns == 1:
            yield from _run(plan, bundle, failed, said)
        else:
            yield from middle_turns([r for _ in range(plan.turns) for r in _run(plan, bundle, failed, said)])


def middle_turns(records: Sequence[Record]) -> list[Record]:
    """Of each cell's records, one a turn, the one with the middle rate; `turns` has the rates of all, requests a second."""
    cells: dict[str, list[Record]] = {}
    for r in records:
        cells.setdefault(json.dumps([r["system"], r["batch"], r["cell"]], sort_keys=True), []).append(r)
    middle = []
    for turns in cells.values():
        timed = sorted((r for r in turns if "requests_per_s" in r), key=lambda r: r["requests_per_s"])
        middle.append(timed[len(timed) // 2] | {"turns": [r["requests_per_s"] for r in timed]} if timed else turns[0])
    return middle


@contextmanager
def _bundle(plan: Plan) -> Iterator[Bundle]:
    bundle = read_bundle(plan.bundle)
    if not plan.hidden:
        yield bundle
        return
    with TemporaryDirectory(prefix="dpiframe-wide-") as folder:
        yield widened(bundle, plan.hidden, Path(folder) / "wide", plan.seed)


def _run(plan: Plan, bundle: Bundle, failed: Failed, said: Callable[[str], None]) -> Iterator[Record]:
    give_up = time.monotonic() + plan.budget_s
    payloads = {rows: Payloads.draw(bundle, rows, plan.seed) for rows in plan.candidates}
    for system in plan.systems:
        peer = PEERS.get(system)
        if peer is not None and (why := missing(peer, python_of(peer, plan.peer_python))):
            said(f"{system}: skipped, {why}")
            yield record("serving", system, model=plan.model, cell={"form": None}, skipped=why)
            continue
        for gpus in plan.gpus if system in OURS else plan.gpus[:1]:
            server = ExitStack()  # ours serves all forms; a peer is started for each
            with on_cores(plan.cores * gpus), server:
                started = None
                for form in plan.forms:
                    cell = {"form": form, "gpus": gpus} | ({"cores": plan.cores * gpus} if plan.cores else {})
                    if peer is not None and form in peer.lacks:
                        yield record("serving", system, model=plan.model, cell=cell, skipped=peer.lacks[form])
                        continue
                    if time.monotonic() > give_up:
                        said(f"{system} {form}: out of time, not begun")
                        continue
                    try:
                        if peer is not None:
                            server.close()
                        if started is None or peer is not None:
                            started = server.enter_context(_started(plan, bundle.path, system, gpus, form))
                        yield from _measured(plan, system, cell, started, payloads, give_up, said)
                    except Exception as error:
                        if started is not None:
                            error.add_note(started.last_words)
                        failed(f"{system} {form}", error)


@contextmanager
def _started(plan: Plan, bundle: Path, system: str, gpus: int, form: str) -> Iterator[Running]:
    peer = PEERS.get(system)
    if peer is None:
        with our_server(our_config(system, bundle, plan.device, gpus, plan.ingress)) as running:
            yield running
    else:
        (port,) = free_ports(1)
        command = peer.command(python_of(peer, plan.peer_python), bundle, port, plan.device, form)
        with process(command, port, peer.environment) as running:
            yield running


def _measured(
    plan: Plan, system: str, cell: dict[str, object], server: Running, payloads: dict[int, Payloads], give_up: float,
    said: Callable[[str], None],
) -> Iterator[Record]:  # fmt: skip
    for rows, payload in payloads.items():
        path, headers, bodies = _requests(system, str(cell["form"]), payload)
        worst = 0.0
        for body, expected in list(zip(bodies, payload.scores, strict=True))[:4]:
            scores = scores_in(first_answer(server, path, headers, body), str(cell["form"]))
            worst = max(worst, float(np.abs(scores - expected).max()))
        if not worst <= GOLDEN_TOLERANCE[plan.precision]:
            raise AssertionError(f"{system}: got scores off by {worst}, expected at most {GOLDEN_TOLERANCE[plan.precision]}")
        settle(server)
        requests = [request_bytes(server.port, path, body, headers) for body in bodies]
        common = {"seconds": plan.seconds, "processes": plan.load_processes, "seed": plan.seed}
        best = 0.0
        for connections in plan.connections:
            if time.monotonic() > give_up:
                said(f"{system} {cell['form']} {rows} candidates: out of time")
                return
            before, begin = cpu_s(server), time.monotonic()
            load = drive(server.loaded, requests, connections=connections, **common)
            spent = (cpu_s(server) - before) / (time.monotonic() - begin) / load.requests_per_s
            best = max(best, load.requests_per_s)
            own = cell | {"connections": connections, "rate": 0}
            yield _record(plan, system, rows, own, load, worst, len(bodies[0])) | {"cpu_us": round(spent * 1e6, 1)}
        for rate in [*(best * share for share in plan.offered), *plan.rates]:
            if time.monotonic() > give_up:
                said(f"{system} {cell['form']} {rows} candidates: out of time")
                return
            if rate > _BEYOND * best:
                what = f"{system} {cell['form']} {rows} candidates"
                said(f"{what}: {rate:.0f} requests/s not offered, at most {best:.0f} are answered")
                continue
            connections = max(64, 2 * max(plan.connections))
            load = drive(server.loaded, requests, connections=connections, rate=rate, **common)
            offered = cell | {"connections": connections, "rate": round(rate)}
            yield _record(plan, system, rows, offered, load, worst, len(bodies[0]))


def _requests(system: str, form: str, payload: Payloads) -> tuple[str, dict[str, str], list[bytes]]:
    """Path, headers and bodies of a form as a system takes them."""
    peer = PEERS.get(system)
    if peer is None:
        path = "/v2/models/demo/infer" if form in ("binary", "bytes") else "/v1/score"
        return path, *payload.bodies(form)
    return peer.path.format(form=form), *payload.bodies(form, wrapped=peer.wrapped, batched=peer.batched)


def _record(
    plan: Plan, system: str, rows: int, cell: dict[str, object], load: Load, worst: float, body_bytes: int
) -> Record:  # fmt: skip
    fanin = {"ingress": plan.ingress} if system in (FANIN, FANIN_DIRECT) else {}
    return record(
        "serving", system, model=plan.model, batch=rows, cell=cell, times=load.times, rows_per_s=load.requests_per_s * rows,
        max_abs_err=worst, requests_per_s=round(load.requests_per_s, 1), failed=load.failed, reconnects=load.reconnects,
        body_bytes=body_bytes, load_cpu_share=load.cpu_share, load_late_p99_us=load.late_p99_us, load_limited=load.limited,
        **fanin,
    )  # fmt: skip
