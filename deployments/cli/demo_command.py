"""What `dpiframe demo` ends with: a served bundle's example request at work, raw feature values as a client has them."""

import statistics
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from deployments.serve.cluster import LaunchError

_SHOWN_CANDIDATES = 8
_REQUESTS = 50


def show_example(url: str, device: str, bundle: Path, out: Console) -> None:
    """Sends it again and again and prints what came back, and the curl line that does the same."""
    body = (bundle / "example.json").read_bytes()
    headers = {"content-type": "application/json"}
    took_ms = []
    with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        for _ in range(_REQUESTS):
            start = time.perf_counter()
            answer = client.post("/v1/score", content=body)
            took_ms.append((time.perf_counter() - start) * 1e3)
            if answer.status_code != 200:
                raise LaunchError(f"{url}/v1/score: got status {answer.status_code} {answer.text[:200]}, expected 200")
    result = answer.json()
    scores = result["scores"]
    columns = scores if isinstance(scores, dict) else {"score": scores}
    total = len(next(iter(columns.values())))
    table = Table("candidate", *columns, title=f"{result['model']} {result['version']} on {device}")
    for i in range(min(total, _SHOWN_CANDIDATES)):
        table.add_row(str(i), *(f"{column[i]:.4f}" for column in columns.values()))
    if total > _SHOWN_CANDIDATES:
        table.add_row("...", *(f"{total} in all" for _ in columns))
    out.print(table)
    timing = result["timing_ms"]
    steps = ", ".join(f"{step} {timing[step]:.2f}" for step in ("queue", "encode", "device"))
    first, median = took_ms[0], statistics.median(took_ms)
    out.print(f"{_REQUESTS} requests of {total} candidates over HTTP: first {first:.1f} ms, median {median:.2f} ms.")
    out.print(f"Inside the last one, in ms: {steps}.")
    out.print("Try it while the server is up (make serve):")
    curl = f"curl -s {url}/v1/score -H 'content-type: application/json' -d @{bundle / 'example.json'}"
    out.print(f"  {curl}", markup=False, soft_wrap=True)
