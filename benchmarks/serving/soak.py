"""A service under steady load for minutes: each process's memory, descriptors and threads, GPU memory, and failed requests.

Fails on growth: of a process's medians, that of the last third against that of the first third behind the time to settle; on
a request that failed; and if the service ends. Ray's daemons are judged by a looser rule: docs/faults.md says why.
"""

import math
import os
import re
import shutil
import statistics
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.records.record import Record, record
from benchmarks.serving.load import Load, drive, request_bytes
from benchmarks.serving.payloads import Payloads
from benchmarks.serving.systems import OURS, first_answer, our_config, our_server, settle
from deployments.serve.host import free_ports
from dpiframe_core.bundle.bundle import read_bundle

_CONNECTIONS = 16
_TELL_S = 60.0
_PART_S = 20.0  # of the load: the generator's own memory starts anew
_SETTLE = 0.25  # of the time
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PATH = "/v2/models/demo/infer"
_POOL = re.compile(r'^ray_dpiframe_device_pool_bytes\{.*?replica="([^"]*)".*?\} (\S+)', re.MULTILINE)
# What a figure may grow by, and by which share of it, whichever is more.
ALLOWED = {"rss_mb": (8.0, 0.03), "descriptors": (4.0, 0.0), "threads": (2.0, 0.0), "gpu_mb": (8.0, 0.0)}
# Of Ray's daemons, which run no code of ours. Their pools make threads up to a bound as they are asked, so threads are shown,
# not judged; a thread brings a megabyte and an event descriptor or two.
ALLOWED_RAY = {"rss_mb": (32.0, 0.1), "descriptors": (32.0, 0.0)}
_RAY = re.compile(
    r"^\d+ (gcs_server|raylet|monitor\.py|dashboard\.py|log_monitor\.py|ray::\w+Agent|agent\.py|ray::Dashboard\w*)$"
)


@dataclass(frozen=True)
class Plan:
    """share: of the most that the service answers in a closed loop. direct: past HAProxy, on the direct port."""

    bundle: Path
    device: str
    topology: str
    replicas: int
    ingress: int
    candidates: int
    minutes: float
    share: float
    load_processes: int
    direct: bool = False
    sample_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """What was seen of one process, or of the GPU. figures: name -> (seconds, value)."""

    name: str
    figures: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))


def thirds(points: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> tuple[float, float] | None:
    """The medians of the first and the last third behind the time to settle; None if one has no point."""
    settled = begin_s + _SETTLE * (end_s - begin_s)
    third = (end_s - settled) / 3
    first = [value for at, value in points if settled <= at < settled + third]
    last = [value for at, value in points if at >= end_s - third]
    return (statistics.median(first), statistics.median(last)) if first and last else None


def growths(seen: Mapping[str, Series], begin_s: float, end_s: float) -> tuple[list[str], list[str]]:
    """A line for each process, and a finding for each figure that grew, or process that was not there all the time."""
    lines, findings = [], []
    for series in sorted(seen.values(), key=lambda s: s.name):
        told = []
        for figure, points in series.figures.items():
            both = thirds(points, begin_s, end_s)
            if both is None:
                findings.append(f"{series.name}: got it for a part of the time, expected it from beginning to end")
                break
            first, last = both
            told.append(f"{figure} {first:.0f} to {last:.0f}")
            most, share = (ALLOWED_RAY if _RAY.match(series.name) else ALLOWED).get(figure, (math.inf, 0.0))
            if last - first > max(most, share * first):
                findings.append(f"{series.name}: got {figure} {first:.1f} and then {last:.1f}, expected no growth")
        lines.append(f"{series.name:34} {', '.join(told)}")
    return lines, findings


def minutes(points: Sequence[tuple[float, float]]) -> list[float]:
    """The median of each minute that has points."""
    of: defaultdict[int, list[float]] = defaultdict(list)
    for at, value in points:
        of[int(at // 60)].append(value)
    return [round(statistics.median(of[minute]), 1) for minute in sorted(of)]


@dataclass(slots=True)
class _Requests:
    """What became of them so far."""

    answered: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    reconnects: int = 0
    p99_us: list[float] = field(default_factory=list)  # of each part

    def add(self, load: Load, seconds: float) -> None:
        self.answered += load.requests_per_s * seconds
        self.failed.update(load.failed)
        self.reconnects += load.reconnects
        self.p99_us.append(round(load.times.p99_us))

    def findings(self) -> list[str]:
        return [f"requests: got {dict(self.failed)} that failed, expected none"] if self.failed else []


def run(plan: Plan, said: Callable[[str], None]) -> Iterator[Record]:
    """The record of each minute so far, and at the end the last one: `passed` is known, `findings` say what is wrong."""
    payload = Payloads.draw(read_bundle(plan.bundle), plan.candidates, plan.seed)
    headers, bodies = payload.bodies("binary")
    system = OURS[plan.topology == "fanin"]
    config = our_config(system, plan.bundle, plan.device, plan.replicas, plan.ingress)
    if plan.direct:
        config["http"] = {"direct_port": free_ports(1)[0]}
    with our_server(config) as server:
        first_answer(server, _PATH, headers, bodies[0])
        settle(server)
        port = config["http"]["direct_port"] if plan.direct else server.port
        requests = [request_bytes(port, _PATH, body, headers) for body in bodies]
        common = {"connections": _CONNECTIONS, "processes": plan.load_processes, "seed": plan.seed}
        most = drive(port, requests, seconds=5, **common).requests_per_s
        rate = plan.share * most
        said(f"{system}: {most:.0f} requests/s at most; {rate:.0f} for {plan.minutes:g} minutes")
        seen_requests, ended = _Requests(), ""
        with sampled(server.process.pid, f"http://127.0.0.1:{server.port}", plan.sample_s) as (seen, begun):

            def told(passed: bool | None, findings: Sequence[str]) -> Record:
                return record(
                    "soak", system, model="demo", batch=plan.candidates,
                    cell={"minutes": plan.minutes, "share": plan.share, "direct": plan.direct, "ingress": plan.ingress},
                    passed=passed, findings=list(findings), seconds=round(time.monotonic() - begun, 1), most_per_s=round(most),
                    offered_per_s=round(rate), answered=round(seen_requests.answered), failed=dict(seen_requests.failed),
                    reconnects=seen_requests.reconnects, part_p99_us=list(seen_requests.p99_us),
                    processes={s.name: {figure: minutes(at) for figure, at in s.figures.items()} for s in list(seen.values())},
                )  # fmt: skip

            end, tell_at = begun + plan.minutes * 60, begun + _TELL_S
            while (left := end - time.monotonic()) > 0:
                try:
                    load = drive(port, requests, seconds=min(_PART_S, left), rate=rate, warm_s=0, **common)
                except RuntimeError as error:  # nobody answers any more
                    ended = f"service: {error}" + (
                        f"; it ended: {server.last_words}" if server.process.poll() is not None else ""
                    )
                    break
                seen_requests.add(load, min(_PART_S, left))
                if time.monotonic() >= tell_at:
                    tell_at += _TELL_S
                    yield told(None, seen_requests.findings())
            over = time.monotonic()
        lines, findings = growths(seen, 0.0, over - begun)
        said("\n".join(lines))
        findings += seen_requests.findings() + ([ended] if ended else [])
        yield told(not findings, findings)


@contextmanager
def sampled(session: int, url: str, every_s: float) -> Iterator[tuple[dict[str, Series], float]]:
    """What is seen of a session's processes, and of what they hold of GPUs, meanwhile; and when that began."""
    seen: dict[str, Series] = {}
    done, begun = threading.Event(), time.monotonic()

    def work() -> None:
        while not done.is_set():
            now, alive = time.monotonic() - begun, list(processes(session))
            for key, name, figures in [*alive, *device_memory(url, {pid for pid, *_ in alive})]:
                series = seen.setdefault(key, Series(name))
                for figure, value in figures.items():
                    series.figures[figure].append((now, value))
            done.wait(every_s)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield seen, begun
    finally:
        done.set()
        thread.join()


def processes(session: int) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(process id, name, figures) of those that live."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has just ended
            command = (folder / "cmdline").read_text().replace("\0", " ").strip()
            if os.getsid(int(folder.name)) != session or not command:
                continue
            rss = int((folder / "statm").read_text().split()[1]) * _PAGE / 2**20
            threads = int((folder / "stat").read_text().rpartition(")")[2].split()[17])
            descriptors = len(os.listdir(folder / "fd"))
            name = f"{folder.name} {_name(command)}"
            yield folder.name, name, {"rss_mb": rss, "descriptors": descriptors, "threads": threads}


def _name(command: str) -> str:
    if "deployments.cli.main" in command:
        return "dpiframe serve"
    parts = [Path(part).name for part in command.split()]
    return next((p for p in parts if not p.startswith(("python", "-")) and p), command)[:26]


def device_memory(url: str, pids: Collection[str]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(key, name, figures) of what a service's processes hold of GPUs. Of a card that others use too, its sum says nothing.

    Where the driver does not tell processes apart (as in some containers) it is what their pools hold, as the service says.
    """
    if shutil.which("nvidia-smi") is None:
        return
    told = False
    for pid, used in _listed("compute-apps=pid,used_memory"):
        if pid in pids and used.isdigit():
            told = True
            yield f"gpu of {pid}", f"{pid} on its GPU", {"gpu_mb": float(used)}
    if not told:
        with suppress(httpx.HTTPError):
            for replica, held in _POOL.findall(httpx.get(f"{url}/metrics", timeout=10).text):
                yield f"pool {replica}", f"pool of {replica}", {"gpu_mb": float(held) / 2**20}
    for index, used in _listed("gpu=index,memory.used"):
        yield f"card {index}", f"card {index}, whoever uses it", {"card_mb": float(used)}


def _listed(what: str) -> list[list[str]]:
    asked = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
