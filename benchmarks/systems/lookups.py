"""The lookups that suite `embedding` compares, each over one cell's tables and batches, ids in the order it reads them best."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from benchmarks.systems.embedding_cells import MIXED, Cell
from benchmarks.systems.fbgemm import TableBatch
from benchmarks.systems.gather import UNROLLS, Gather
from dpiframe_core.features.row_block import RowBlock
from kernels.cpu.lookup import PackedLookup
from kernels.dense.linear import padded
from kernels.lookup.batch_header import HeaderWord
from kernels.lookup.descriptors import whole
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.plan import Batch, LookupPlan
from kernels.runtime.state import STATE_WORDS

SYSTEMS = ("dpiframe", "eager", "stacked-eager", "fbgemm", "gather")
Lookup = Callable[[int], torch.Tensor]  # issues the lookup of batch i and gives its output [rows, >= width]


@dataclass(frozen=True, eq=False)
class Task:
    """One cell's tables and batches on a device. `ids[i]`: int32[batch, fields * bag] of batch i."""

    cell: Cell
    device: torch.device
    plan: LookupPlan
    tables: list[torch.Tensor]  # what the peers hold: float16 for an int8 cell
    blocks: list[RowBlock]
    ids: list[torch.Tensor]

    @property
    def width(self) -> int:
        return self.cell.fields * self.cell.dim

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.cell.dtype == "float32" or self.device.type == "cpu" else torch.bfloat16


@dataclass(frozen=True, eq=False)
class Candidate:
    """A lookup and the names under which it is measured: launched anew each time, and replayed as a captured graph.
    pooled: what it gave as vectors of bags.
    """

    lookup: Lookup
    launched: str | None = None
    captured: str | None = None
    pooled: Callable[[torch.Tensor], torch.Tensor] = lambda given: given
    holds: tuple[object, ...] = ()  # what only addresses refer to


def candidates(system: str, task: Task) -> list[Candidate]:
    """A system's ways to look up.

    Raises:
        ValueError: an unknown system.
    """
    if task.cell.bag == MIXED and system in ("eager", "stacked-eager", "fbgemm"):  # they are written for bags that are alike
        return []
    match system:
        case "dpiframe":
            return _dpiframe(task)
        case "eager":
            return [Candidate(_per_table(task), "eager")]
        case "stacked-eager":
            return [Candidate(_stacked(task), "stacked-eager", "stacked-captured")]
        case "fbgemm":
            return [Candidate(_fbgemm(task), "fbgemm", "fbgemm-captured")]
        case "gather":
            return _gathers(task) if task.cell.against_gather and task.device.type == "cuda" else []
    raise ValueError(f"system: got {system!r}, expected one of {', '.join(SYSTEMS)}")


def _dpiframe(task: Task) -> list[Candidate]:
    """The kernel itself; on a GPU with ids on the device (`dpiframe`) and in pinned memory (`dpiframe-pinned`)."""
    rows = task.cell.batch
    if task.device.type == "cpu":
        stacked = PackedLookup(task.plan, task.tables)
        return [Candidate(lambda i: stacked.read(task.blocks[i])[0], "dpiframe")]  # type: ignore[arg-type,return-value]
    plan, tables, scales = _stored(task)
    lookup = DeviceLookup(plan, whole(tables, scales, task.device), task.out_dtype)
    x = torch.zeros(rows, padded(task.width), dtype=task.out_dtype, device=task.device)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=task.device)

    def of(batches: list[Batch]) -> Lookup:
        def one(i: int) -> torch.Tensor:
            lookup(batches[i], rows, x, None, state)
            return x

        return one

    return [
        Candidate(of([batch_of(b, task.device) for b in task.blocks]), captured="dpiframe", holds=(tables, scales)),
        Candidate(of([batch_of(b, None) for b in task.blocks]), captured="dpiframe-pinned", holds=(tables, scales)),
    ]


def _stored(task: Task) -> tuple[LookupPlan, list[torch.Tensor], list[torch.Tensor]]:
    """The plan and tables as our kernel reads them, with float32[dim] scales for int8 ones."""
    if task.cell.dtype != "int8":
        return task.plan, task.tables, []
    scales = [t.abs().amax(0).float() / 127 for t in task.tables]
    tables = [(t / scale.to(t.dtype)).round_().to(torch.int8) for t, scale in zip(task.tables, scales, strict=True)]
    return replace(task.plan, tables=tuple(replace(s, dtype=torch.int8) for s in task.plan.tables)), tables, scales


def batch_of(block: RowBlock, device: torch.device | None) -> Batch:
    """A block's sections on a device; None: in host memory, pinned where there is a GPU."""
    block.header[HeaderWord.STAGED_ROWS] = block.rows
    sections = (
        block.header,
        block.request_of_row,
        block.context_ids,
        block.candidate_ids,
        block.context_dense,
        block.candidate_dense,
    )
    tensors = [torch.from_numpy(s) for s in sections]
    if device is None and torch.cuda.is_available():
        return Batch(*(t.pin_memory() if t.numel() else t for t in tensors))
    return Batch(*(t.to(device or "cpu") for t in tensors))


def wide_batch(block: RowBlock, ids: np.ndarray) -> Batch:
    """A batch for `kernels.reference`, which takes ids as int32 or int64[rows, columns]."""
    sections = (
        block.header,
        block.request_of_row,
        block.wide_ids("context_ids"),
        ids,
        block.context_dense,
        block.candidate_dense,
    )
    return Batch(*(torch.from_numpy(s) for s in sections))


def _per_table(task: Task) -> Lookup:
    """What people have: a lookup (or a bag) a field, then one concatenation. A field's ids lie together, ready for it."""
    bag, tables = task.cell.bag, task.tables
    bags = [ids.view(-1, len(tables), bag).transpose(0, 1).contiguous() for ids in task.ids]
    if bag == 1:
        columns = [b.squeeze(2).unbind(0) for b in bags]
        return lambda i: torch.cat([functional.embedding(c, t) for c, t in zip(columns[i], tables, strict=True)], 1)
    by_field = [b.unbind(0) for b in bags]
    return lambda i: torch.cat(
        [functional.embedding_bag(b, t, mode="sum") for b, t in zip(by_field[i], tables, strict=True)], 1
    )


def _stacked(task: Task) -> Lookup:
    """All tables in one, ids shifted: two kernels."""
    bag, ids, weight = task.cell.bag, task.ids, torch.cat(task.tables)
    starts = _starts(task).repeat_interleave(bag)
    if bag == 1:
        return lambda i: functional.embedding(ids[i] + starts, weight).flatten(1)
    rows = task.cell.batch
    return lambda i: functional.embedding_bag((ids[i] + starts).view(-1, bag), weight, mode="sum").view(rows, -1)


def _starts(task: Task) -> torch.Tensor:
    """The first row of each table in the stacked one. int32: no cell has 2^31 rows."""
    sizes = torch.tensor([0, *(t.shape[0] for t in task.tables[:-1])])
    return sizes.cumsum(0).int().to(task.device)


def _pooled(rows: torch.Tensor, task: Task, scales: list[torch.Tensor]) -> torch.Tensor:
    """Vectors of bags of the rows that a gather found, int8 ones times their scales."""
    bags, dim = task.cell.bags, task.cell.dim
    found = [own.float().sum(1) for own in rows.view(task.cell.batch, -1, dim).split(bags, 1)]
    return torch.cat([v * s for v, s in zip(found, scales, strict=True)] if scales else found, 1)


def _fbgemm(task: Task) -> Lookup:
    batch = TableBatch(task.tables, task.cell.batch, task.out_dtype, bag=task.cell.bag, int8=task.cell.dtype == "int8")
    indices = [batch.indices(ids).contiguous() for ids in task.ids]
    return lambda i: batch(indices[i])


def _gathers(task: Task) -> list[Candidate]:
    _, tables, scales = _stored(task)
    weight, starts = torch.cat(tables), _starts(task).repeat_interleave(torch.tensor(task.cell.bags, device=task.device))
    flat = [(ids + starts).flatten() for ids in task.ids]
    out = torch.empty(len(flat[0]), task.cell.dim, dtype=weight.dtype, device=task.device)

    def of(gather: Gather) -> Lookup:
        def one(i: int) -> torch.Tensor:
            gather(weight, flat[i], out)
            return out.view(task.cell.batch, -1)

        return one

    pooled = partial(_pooled, task=task, scales=scales)
    return [Candidate(of(Gather(task.cell.row_bytes, u)), captured=f"gather-{u}", pooled=pooled) for u in UNROLLS]
