"""Measures calls, and writes results as JSON with the machine, the versions and the commit that made them."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def run_facts(seed: int) -> dict[str, Any]:
    """Run-level facts: gpu, driver, versions, commit (with "+" if the tree differs from it), date, seed."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None
    dirty = "+" if _output("git", "status", "--porcelain", "--untracked-files=no") else ""
    commit = os.environ.get("DPIFRAME_COMMIT") or (_output("git", "rev-parse", "--short=12", "HEAD") or "unknown") + dirty
    return {
        "gpu": gpu,
        "driver": driver.splitlines()[0] if driver else None,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cupy": _version("cupy-cuda13x") or _version("cupy-cuda12x"),
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def latency_us(call: Callable[[int], object], *, seconds: float, least: int = 50) -> tuple[float, float, int]:
    """(median, p99, calls) of call(i), i = 0, 1, ..; warmed up, for about `seconds`."""
    begin = time.perf_counter()
    for i in range(10):
        call(i)
    once = (time.perf_counter() - begin) / 10
    count = max(least, min(5000, int(seconds / max(once, 1e-7))))
    times = []
    for i in range(count):
        start = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - start)
    times.sort()
    return times[count // 2] * 1e6, times[min(count - 1, int(count * 0.99))] * 1e6, count


def write(path: Path, run: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """{"run": .., "records": [..]}, one record a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(r) for r in records)
    path.write_text(f'{{"run": {json.dumps(run)},\n "records": [\n  {lines}\n]}}\n')


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
