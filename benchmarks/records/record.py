"""One measurement as a record, and the facts of the run that it is of: machine, versions, commit, date."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Times
from dpiframe_core.machine.machine import machine

Record = dict[str, Any]


def run_facts(seed: int, device: torch.device) -> dict[str, Any]:
    """Run-level facts: gpu, driver, versions, commit (with "+" if the tree differs from it), date, seed."""
    here = machine(device)
    dirty = "+" if _output("git", "status", "--porcelain", "--untracked-files=no") else ""
    commit = os.environ.get("DPIFRAME_COMMIT") or (_output("git", "rev-parse", "--short=12", "HEAD") or "unknown") + dirty
    return {
        "gpu": here.gpu or None,
        "driver": here.driver or None,
        "cpu": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": here.torch,
        "cupy": here.cupy or None,
        "fbgemm": _version("fbgemm-gpu") or _version("fbgemm-gpu-cpu"),
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def record(
    suite: str,
    system: str,
    *,
    model: str | None = None,
    batch: int | None = None,
    precision: str | None = None,
    cell: Mapping[str, Any] | None = None,
    times: Times | None = None,
    device_us: float | None = None,
    rows_per_s: float | None = None,
    max_abs_err: float | None = None,
    **measured: Any,
) -> Record:
    """One measurement. `cell`: what else was fixed for it (ids, dim, lanes, ..); with the named fields it tells records apart.

    rows_per_s defaults to what one caller gets: batch over the median. speedup_vs is filled by `ResultFile`.
    """
    if rows_per_s is None and times and batch:
        rows_per_s = batch / times.p50_us * 1e6
    return {
        "suite": suite,
        "system": system,
        "model": model,
        "batch": batch,
        "precision": precision,
        "cell": dict(cell or {}),
        "p50_us": round(times.p50_us, 2) if times else None,
        "p99_us": round(times.p99_us, 2) if times else None,
        "device_us": None if device_us is None else round(device_us, 3),
        "rows_per_s": None if rows_per_s is None else round(rows_per_s),
        "max_abs_err": max_abs_err,
        "calls": times.calls if times else None,
        "speedup_vs": None,
        **measured,
    }


def title(r: Record) -> str:
    """A system that was told to choose among fewer products is another one: `compile-captured (ATEN)`."""
    return r["system"] + (f" ({r['products']})" if r.get("products") else "")


def identity(r: Record) -> tuple[Any, ...]:
    """(system as `title` says it, then what names the cell)."""
    return title(r), r["suite"], r["model"], r["batch"], r["precision"], json.dumps(r.get("cell", {}), sort_keys=True)


def _processor() -> str:
    """Its architecture, and its maker's name for it where Linux knows one."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{platform.machine()}, {line.partition(':')[2].strip()}"
    return platform.machine()


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
