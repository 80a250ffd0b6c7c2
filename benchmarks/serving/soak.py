"""A service under steady load for minutes: each process's memory, descriptors and threads, GPU memory, and failed requests.

Fails on growth: of a process's medians, that of the last third against that of the first third behind the time to settle.
"""

import os
import shutil
import statistics
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.load import drive, request_bytes
from benchmarks.serving.payloads import Payloads
from benchmarks.serving.systems import OURS, first_answer, our_config, our_server, settle
from dpiframe_core.bundle.bundle import read_bundle

_CONNECTIONS = 16
_PART_S = 20.0  # of the load: the generator's own memory starts anew
_SETTLE = 0.25  # of the time
_PAGE = os.sysconf("SC_PAGE_SIZE")
# What a figure may grow by, and by which share of it, whichever is more.
ALLOWED = {"rss_mb": (8.0, 0.03), "descriptors": (4.0, 0.0), "threads": (2.0, 0.0), "gpu_mb": (8.0, 0.0)}


@dataclass(frozen=True)
class Plan:
    """share: of the most that the service answers in a closed loop."""

    bundle: Path
    device: str
    topology: str
    replicas: int
    ingress: int
    candidates: int
    minutes: float
    share: float
    load_processes: int
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
            most, share = ALLOWED[figure]
            if last - first > max(most, share * first):
                findings.append(f"{series.name}: got {figure} {first:.1f} and then {last:.1f}, expected no growth")
        lines.append(f"{series.name:34} {', '.join(told)}")
    return lines, findings


def run(plan: Plan, said: Callable[[str], None]) -> list[str]:
    """What was found wrong."""
    payload = Payloads.draw(read_bundle(plan.bundle), plan.candidates, plan.seed)
    headers, bodies = payload.bodies("binary")
    path = "/v2/models/demo/infer"
    config = our_config(OURS[plan.topology == "fanin"], plan.bundle, plan.device, plan.replicas, plan.ingress)
    failed, answered, cut = Counter[str](), 0.0, 0
    with our_server(config) as server:
        first_answer(server, path, headers, bodies[0])
        settle(server)
        requests = [request_bytes(server.port, path, body, headers) for body in bodies]
        common = {"connections": _CONNECTIONS, "processes": plan.load_processes, "seed": plan.seed}
        most = drive(server.port, requests, seconds=5, **common).requests_per_s
        rate = plan.share * most
        said(f"{plan.topology}: {most:.0f} requests/s at most; {rate:.0f} for {plan.minutes:g} minutes")
        with sampled(server.process.pid, plan.sample_s) as (seen, begun):
            end = begun + plan.minutes * 60
            while (left := end - time.monotonic()) > 0:
                load = drive(server.port, requests, seconds=min(_PART_S, left), rate=rate, warm_s=0, **common)
                failed.update(load.failed)
                answered += load.requests_per_s * min(_PART_S, left)
                cut += load.reconnects
            over = time.monotonic()
    lines, findings = growths(seen, 0.0, over - begun)
    said("\n".join(lines))
    said(f"{answered:.0f} requests answered, {dict(failed) or 'none'} failed, {cut} connections made anew")
    if failed:
        findings.append(f"requests: got {dict(failed)} that failed, expected none")
    return findings


@contextmanager
def sampled(session: int, every_s: float) -> Iterator[tuple[dict[str, Series], float]]:
    """What is seen of a session's processes and of the GPUs meanwhile, and when that began."""
    seen: dict[str, Series] = {}
    done, begun = threading.Event(), time.monotonic()

    def work() -> None:
        while not done.is_set():
            now = time.monotonic() - begun
            for key, name, figures in [*processes(session), *gpus()]:
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
    parts = [Path(part).name for part in command.split()]
    return next((p for p in parts if not p.startswith(("python", "-")) and p), command)[:26]


def gpus() -> Iterator[tuple[str, str, dict[str, float]]]:
    if shutil.which("nvidia-smi") is None:
        return
    asked = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    for line in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines():
        index, used = line.split(", ")
        yield f"gpu {index}", f"gpu {index}", {"gpu_mb": float(used)}
