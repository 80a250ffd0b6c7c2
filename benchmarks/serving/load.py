"""Drives `load.c`, the load generator: compiles it, sends it the requests, puts the figures of its processes together."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.timing import Times, times_of

_SOURCE = Path(__file__).with_name("load.c")
_WARM_S = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """What clients saw. Filled by `drive`.

    Attributes:
        times: of answered requests, open loop: from when each was due.
        requests_per_s: answered with 2xx within the measured seconds.
        failed: other answers by status, and "unanswered" two seconds after the end.
        cpu_share: of the busiest load process. late_p99_us: how long after they were due requests were seen by the load
            generator, which may not have had a core; with or without a free connection, so that a stall of its own shows for
            all that were due meanwhile. limited: the generator, and not the server, set the rate or the p99.
        answered: with 2xx, those of the warm-up too.
        unsent_p99_us: how long requests that were due were not sent, as the generator was late or no connection was free.
        slow_ms: when the slowest hundredth was due, from the first measured second on: a tenth of it before the first of these,
            half before the second, nine tenths before the third. Close together, they are one stall and not a busy server.
    """

    times: Times
    p999_us: float
    requests_per_s: float
    failed: dict[str, int]
    reconnects: int
    cpu_share: float
    late_p99_us: float
    answered: int
    unsent_p99_us: float
    slow_ms: tuple[float, float, float]

    @property
    def limited(self) -> bool:
        return self.cpu_share > 0.9 or self.late_p99_us > 0.5 * self.times.p99_us


def compiled() -> Path:
    """The generator's program, kept beside the calibration caches under a name that changes with its source.

    Raises:
        FileNotFoundError: there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    source = _SOURCE.read_bytes()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dpiframe"
    program = folder / f"load-{hashlib.sha256(source).hexdigest()[:16]}"
    if not program.exists():
        if compiler is None:
            raise FileNotFoundError("load: got no C compiler (cc or gcc), expected one on the PATH")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / "load"
            subprocess.run([compiler, "-O2", "-o", fresh, _SOURCE, "-lm"], check=True)
            fresh.replace(program)
    return program


def request_bytes(port: int, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A whole POST request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}"]).encode() + b"\r\n\r\n" + body


def drive(
    port: int | Path,
    requests: Sequence[bytes],
    *,
    connections: int,
    seconds: float,
    rate: float = 0.0,
    processes: int = 1,
    warm_s: float = _WARM_S,
    seed: int = 0,
    ahead: bool = False,
) -> Load:
    """Load on 127.0.0.1:`port`, or on the Unix socket of that path, from `processes` processes that share connections and rate.

    Args:
        rate: requests a second that are due, answered or not; 0: each connection sends the next when the last is answered.
        ahead: the processes have a core before all others (SCHED_RR), as clients on other machines have one.

    Raises:
        PermissionError: `ahead`, and the host does not let this process ask for it.
    """
    processes = min(processes, connections)
    stdin = b"".join(struct.pack("<I", len(r)) + r for r in requests)
    running = []
    for i in range(processes):
        own = connections // processes + (i < connections % processes)
        where = ["127.0.0.1", port] if isinstance(port, int) else [port, 0]
        arguments = [*where, own, rate / processes, warm_s, seconds, seed + i]
        command = [str(compiled()), *map(str, arguments)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    for process in running if ahead else ():
        os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(1))
    for process in running:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        process.stdin = None  # else `communicate` would flush it
    outputs = [process.communicate() for process in running]
    for process, (_, said) in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(said.decode().strip() or f"load: got exit status {process.returncode}, expected 0")
    return joined([out for out, _ in outputs])


def joined(outputs: Sequence[bytes]) -> Load:
    """The figures of several load processes as one."""
    heads, answers, statuses = [], [], Counter[str]()
    for out in outputs:
        line, _, raw = out.partition(b"\n")
        head = json.loads(line)
        heads.append(head)
        answers.append(np.frombuffer(raw, np.float32, 4 * head["kept"]).reshape(-1, 4))
        statuses.update(head["status"])
    unanswered = sum(head["unanswered"] for head in heads)
    failed = {status: count for status, count in statuses.items() if not status.startswith("2")}
    times, unsent, late = np.concatenate(answers)[:, :3].T
    first_s = min(head["begin_s"] for head in heads)
    due = np.concatenate(
        [own[:, 3] / 1e3 + (head["begin_s"] - first_s) * 1e3 for head, own in zip(heads, answers, strict=True)]
    )
    if not times.size:
        raise RuntimeError(f"load: got no good answer (others: {failed}, unanswered: {unanswered}), expected some")
    slow_ms = np.quantile(due[times >= np.quantile(times, 0.99)], (0.1, 0.5, 0.9))
    return Load(
        times_of((times / 1e6).tolist()),
        float(np.quantile(times, 0.999)),
        sum(head["answered"] / head["seconds"] for head in heads),
        failed | ({"unanswered": unanswered} if unanswered else {}),
        sum(head["reconnects"] for head in heads),
        max(head["cpu_share"] for head in heads),
        float(np.quantile(late, 0.99)),
        sum(head["answered_in_all"] for head in heads),
        float(np.quantile(unsent, 0.99)),
        (float(slow_ms[0]), float(slow_ms[1]), float(slow_ms[2])),
    )
