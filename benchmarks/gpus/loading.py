"""Tables of files: how long until a store is ready, from the disk and from the kernel's page cache, and what takes the time."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.gpus.group import Group
from benchmarks.gpus.one_sided import bags, held
from benchmarks.gpus.repeated import repeated
from benchmarks.records.record import Record, record
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.shards import Shards
from dpiframe_core.far_rows import host_rows
from dpiframe_core.far_rows.row_copies import RowCopies
from kernels.runtime.host_memory import SharedMemory

_READERS = 8
_READ = 16 << 20  # bytes at once
_DISK = 16 << 30  # bytes that tell the disk's speed


def run(group: Group, folder: Path, total_bytes: int, *, tables: int, dim: int, seed: int) -> Iterator[Record]:
    """Of a quarter of the rows hot, a half warm, a quarter cold."""
    rows = total_bytes // (tables * dim * 2)
    schema = bags(tables, rows, dim, 1).schema
    files = {t.name: folder / f"{t.name}.safetensors" for t in schema.tables}
    if group.rank == 0:
        folder.mkdir(parents=True)
        with repeated(list(files), rows, dim, seed) as values, ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(lambda name: save_file({"table": values[name]}, files[name]), files))
        os.sync()
    group.wait()
    hot, warm = rows // 4, rows * 3 // 4 if group.size > 1 else rows // 4
    placement = Placement(group.size, tuple(TablePlacement(name, rows, hot, warm) for name in files))
    disk = 0.0
    try:
        for cached in (False, True):
            if group.rank == 0 and not cached:
                _forget()
                disk = _read(list(files.values()))  # bytes a second
                _forget()
            disk = group.most(disk)
            begin = time.perf_counter()
            mapped = {}
            for name, path in files.items():
                with safe_open(path, "pt") as file:
                    mapped[name] = file.get_tensor("table")
            with stages() as spent, held(group, schema, mapped, placement) as store:
                ready = group.most(time.perf_counter() - begin)
                cell = {"gpus": group.size, "tables": tables, "rows": rows, "dim": dim, "cached": cached}
                yield record("tiers-load", "one-sided", cell=cell, ready_s=round(ready, 2), table_bytes=total_bytes,
                             gb_per_s=round(total_bytes / ready / 1e9, 2), stages_s=dict(spent),
                             disk_gb_per_s=None if cached else round(disk / 1e9, 2),
                             device_bytes=store.bytes_used, host_bytes=store.host_bytes)  # fmt: skip
    finally:
        group.wait()
        if group.rank == 0:
            shutil.rmtree(folder)


@contextmanager
def stages() -> Iterator[dict[str, float]]:
    """Seconds that stores set up here spend in each step: host memory had (or waited for), locked, rows waited for that are
    copied to host and device meanwhile, those that another process copies, the share of warm rows filled."""
    spent: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                spent[name] = round(spent.get(name, 0.0) + time.perf_counter() - begin, 3)

        return around

    with (
        mock.patch.object(SharedMemory, "claim", timed("memory", SharedMemory.claim)),
        mock.patch.object(host_rows, "DeviceReadable", timed("locked", vars(host_rows)["DeviceReadable"])),
        mock.patch.object(RowCopies, "wait", timed("copied", RowCopies.wait)),
        mock.patch.object(SharedMemory, "filled", timed("awaited", SharedMemory.filled)),
        mock.patch.object(Shards, "_take_slot", timed("share", Shards._take_slot)),
    ):
        yield spent


def _forget() -> None:
    """Empties the kernel's page cache."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _read(files: list[Path]) -> float:
    """Bytes a second of what the first files have, read by several threads, a part each."""
    parts = [(path, at) for path in files for at in range(0, path.stat().st_size, _READ)][: _DISK // _READ]
    begin = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        read = sum(pool.map(_read_part, parts))
    return read / (time.perf_counter() - begin)


def _read_part(part: tuple[Path, int]) -> int:
    path, at = part
    file = os.open(path, os.O_RDONLY)
    try:
        return len(os.pread(file, _READ, at))
    finally:
        os.close(file)
