"""Suite `http`: the real endpoint (Ray Serve behind HAProxy) against a plain uvicorn + FastAPI app with the eager model.

Same bundle, same bodies (columnar JSON, raw values), same cores, the load generator beside them on those cores.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records.record import Record, record
from benchmarks.serving.http_load import load
from benchmarks.serving.systems import first_answer, our_server, process, settle
from benchmarks.timing import Times
from deployments.serve.host import free_ports
from dpiframe_core.bundle.bundle import read_bundle


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
    (port,) = free_ports(1)
    servers = {
        "uvicorn-eager": process([sys.executable, "-m", "benchmarks.serving.peers.eager_http", str(bundle), str(port)], port),
        "dpiframe": our_server({"models": [{"path": str(bundle.absolute())}]}),
    }
    answers: dict[str, list[float]] = {}
    for system, starting in servers.items():
        with starting as server:
            answers[system] = first_answer(server, "/v1/score", _JSON, sent[0]).json()["scores"]
            settle(server)
            worst = float(np.abs(np.subtract(answers[system], answers["uvicorn-eager"])).max())
            if worst > 1e-3:
                raise AssertionError(f"{system}: got scores off by {worst}, expected those of the eager model")
            for n in clients:
                p50, p99, rate, calls = load("127.0.0.1", server.port, sent, n, seconds)
                yield record(
                    "http", system, model="demo", batch=rows, cell={"clients": n}, times=Times(p50, p99, calls),
                    rows_per_s=rate * rows, max_abs_err=worst, requests_per_s=round(rate, 1),
                )  # fmt: skip


_JSON = {"content-type": "application/json"}
