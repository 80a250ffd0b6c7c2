"""Suite `embedding`: the lookup alone, ids on the device (and, for ours, in pinned memory as the engine has them) to vectors.

A call is a launch and the wait for it; device time is that of many launches in one CUDA graph, so the gap between two kernels
is in it, for every system alike. Each system reads ids in its own order. All are checked against `kernels.reference`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed
from benchmarks.systems.embedding_cells import Cell
from benchmarks.systems.lookups import Lookup, Task, candidates, wide_batch
from benchmarks.timing import Captured, interleaved
from benchmarks.workloads.blocks import drawn_blocks, wide_ids
from benchmarks.workloads.workload import schema_of
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.graph.graph import Attrs, Node, Source
from kernels import reference

_CHECKED_ROWS = 256
_LAUNCHES = 16  # of one graph, for device time


def run(
    cells: Sequence[Cell],
    systems: Sequence[str],
    device: torch.device,
    failed: Failed,
    *,
    seconds: float,
    seed: int,
    max_rows: int | None = None,
) -> Iterator[Record]:
    """Yields a record a system and cell. A system that fails is reported through `failed`; the others go on."""
    tables: list[torch.Tensor] = []
    made_for: tuple[object, ...] = ()
    for cell in cells:
        wanted = cell.sizes(max_rows), cell.dim, cell.dtype
        if wanted != made_for:
            tables.clear()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # up to 20 GB a copy of the tables
            generator = torch.Generator(device).manual_seed(seed)
            dtype = torch.float32 if cell.dtype == "float32" else torch.float16
            for n in wanted[0]:
                tables.append(torch.randn(n, cell.dim, device=device, dtype=dtype, generator=generator).mul_(0.1))
            made_for = wanted
        task = _task(cell, wanted[0], tables, device, seed)
        for r in _measured(task, systems, failed, seconds):
            yield r if max_rows is None else {**r, "cell": {**r["cell"], "max_rows": max_rows}}


def _task(cell: Cell, sizes: tuple[int, ...], tables: list[torch.Tensor], device: torch.device, seed: int) -> Task:
    schema = schema_of(sizes, cell.dim, dtype="float32" if cell.dtype == "float32" else "float16", bag=cell.bags)
    sources = tuple(Source(f.name, f.table, cell.dim) for f in schema.features)
    plan = plan_lookup(Node("lookup", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=sources)), schema)
    count = 4 if cell.large else max(2, min(8, 32768 // cell.batch))
    blocks = drawn_blocks(schema, cell.batch, count, skew=cell.ids, seed=seed + cell.batch)
    ids = [torch.from_numpy(wide_ids(b)).to(device) for b in blocks]
    return Task(cell, device, plan, tables, blocks, ids)


def _measured(task: Task, systems: Sequence[str], failed: Failed, seconds: float) -> Iterator[Record]:
    calls: dict[str, Callable[[int], object]] = {}
    errors: dict[str, float] = {}
    device_us: dict[str, float] = {}
    graphs: list[Captured] = []
    expected, count = _expected(task), len(task.blocks)
    for system in systems:
        what = f"{system} {task.cell}"
        try:
            with torch.inference_mode():
                for c in candidates(system, task):
                    error = _error(c.pooled(c.lookup(0)), expected, task, what)
                    if c.launched:
                        calls[c.launched], errors[c.launched] = _launched(c.lookup, count, task.device), error
                    if c.captured and task.device.type == "cuda":
                        own = [Captured(lambda i=i, c=c: c.lookup(i)) for i in range(count)]
                        many = Captured(lambda c=c: _one_after_the_other(c.lookup, count))
                        graphs += [*own, many]
                        calls[c.captured], errors[c.captured] = lambda i, own=own: own[i % count](), error
                        device_us[c.captured] = many.device_us() / _LAUNCHES
        except Exception as failure:
            failed(what, failure)
    with torch.inference_mode():
        times = interleaved(calls, seconds)
    for graph in graphs:
        graph.close()
    for name, t in times.items():
        us = device_us.get(name)
        yield record(
            "embedding", name, batch=task.cell.batch, cell=task.cell.named(), times=t, device_us=us, max_abs_err=errors[name],
            bytes_per_s=None if us is None else round(_bytes(name, task.cell) / us * 1e6),
        )  # fmt: skip


def _bytes(system: str, cell: Cell) -> int:
    return cell.gathered_bytes if system.startswith("gather") and cell.bag != 1 else cell.bytes_moved


def _one_after_the_other(lookup: Lookup, count: int) -> torch.Tensor:
    """Each output is let go before the next, which so gets its memory: systems that allocate walk through no more of it."""
    for i in range(_LAUNCHES - 1):
        lookup(i % count)
    return lookup((_LAUNCHES - 1) % count)


def _launched(lookup: Lookup, count: int, device: torch.device) -> Callable[[int], object]:
    if device.type == "cpu":
        return lambda i: lookup(i % count)
    stream = torch.cuda.current_stream()

    def call(i: int) -> None:
        lookup(i % count)
        stream.synchronize()

    return call


def _expected(task: Task) -> torch.Tensor:
    """float32[checked rows, width] of `kernels.reference`, over copies of just the table rows that these rows read."""
    stops = np.cumsum(task.cell.bags)
    ids = wide_ids(task.blocks[0])[_checked(task)]
    small, tables = np.zeros_like(ids), []
    for f, table in enumerate(task.tables):
        at = slice(stops[f] - task.cell.bags[f], stops[f])
        used, inverse = np.unique(ids[:, at], return_inverse=True)
        small[:, at] = inverse.reshape(ids[:, at].shape)
        tables.append(table[torch.from_numpy(used).long().to(table.device)].cpu())
    shapes = tuple(replace(s, rows=len(t), dtype=t.dtype) for s, t in zip(task.plan.tables, tables, strict=True))
    batch = wide_batch(RowBlock.allocate(task.blocks[0].layout, len(ids)), small)
    return reference.lookup(replace(task.plan, tables=shapes), tables, batch, len(ids))[0]


def _checked(task: Task) -> np.ndarray:
    """Which rows are compared: evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, task.cell.batch - 1, _CHECKED_ROWS).astype(np.int64))


def _error(out: torch.Tensor, expected: torch.Tensor, task: Task, what: str) -> float:
    """The largest deviation. float32 rows come out as they are, and their sums to rounding; others to their dtype's.

    Raises:
        AssertionError: it is larger than that.
    """
    got = out[torch.from_numpy(_checked(task)).to(out.device), : task.width].float().cpu()
    top, bag = float(expected.abs().max()), max(task.cell.bags)
    allowed = 0.0 if bag == 1 else 8 * 2.0**-23 * bag * top
    if task.cell.dtype != "float32":
        allowed += 2.0**-7 * top
    if task.cell.dtype == "int8":
        allowed += bag * 2 * top / 255
    worst = float((got - expected).abs().max())
    if not worst <= allowed:
        raise AssertionError(f"{what}: got values off by {worst}, expected at most {allowed}")
    return worst
