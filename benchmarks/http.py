"""Suite `http`: the real endpoint (Ray Serve behind HAProxy) against a plain uvicorn + FastAPI app with the eager model.

Same bundle, same bodies (columnar JSON, raw values), same cores, the load generator beside them on those cores.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.http_load import load
from benchmarks.record import Record, record
from benchmarks.timing import Times
from deployments.host import free_ports
from dpiframe_core.bundle import read_bundle


def bodies(example: dict[str, Any], rows: int, count: int, seed: int) -> list[bytes]:
    """Requests of `rows` candidates, drawn from the values of the bundle's example."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        columns = {k: [v[i] for i in rng.integers(0, len(v), rows)] for k, v in example["candidates"].items()}
        out.append(json.dumps({"context": example["context"], "candidates": columns}).encode())
    return out


def run(bundle: Path, rows: int, clients: Sequence[int], seconds: float, seed: int) -> Iterator[Record]:
    """Yields a record a system and number of clients. Both systems' scores are compared first."""
    example = read_bundle(bundle).example
    if example is None:
        raise ValueError(f"{bundle}: got no example.json, expected one to make requests from")
    sent = bodies(example, rows, 16, seed)
    commands = {
        "uvicorn-eager": [sys.executable, "-m", "benchmarks.http_peer", str(bundle), "PORT"],
        "dpiframe": [str(Path(sys.executable).with_name("dpiframe")), "serve", "--bundle", str(bundle), "--port", "PORT"],
    }
    answers: dict[str, list[float]] = {}
    for system, command in commands.items():
        with _server(command) as port:
            answers[system] = httpx.post(f"http://127.0.0.1:{port}/v1/score", content=sent[0], headers=_JSON).json()["scores"]
            worst = float(np.abs(np.subtract(answers[system], answers["uvicorn-eager"])).max())
            if worst > 1e-3:
                raise AssertionError(f"{system}: got scores off by {worst}, expected those of the eager model")
            for n in clients:
                p50, p99, rate, calls = load("127.0.0.1", port, sent, n, seconds)
                yield record(
                    "http", system, model="demo", batch=rows, cell={"clients": n}, times=Times(p50, p99, calls),
                    rows_per_s=rate * rows, max_abs_err=worst, requests_per_s=round(rate, 1),
                )  # fmt: skip


_JSON = {"content-type": "application/json"}


@contextmanager
def _server(command: Sequence[str]) -> Iterator[int]:
    """The command with a free port for PORT, once it listens; stopped by SIGTERM, which background jobs of a shell heed too."""
    (port,) = free_ports(1)
    process = subprocess.Popen([str(port) if part == "PORT" else part for part in command])
    try:
        give_up = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/docs", timeout=2).raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"{command}: got no answer on port {port}, expected a server") from None
                time.sleep(0.3)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)
