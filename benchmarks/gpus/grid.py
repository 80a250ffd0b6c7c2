"""Rows of each table in equal parts on the GPUs: read where they lie, or brought by collectives.

The grid of the H100 study of row-wise parallel bags. Each process has a batch of its own, ids uniform, on the device. Systems:
`one-sided`, ours; `nccl`, the faster of `collective.FORMS` by device time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.gpus.collective import FORMS, Collective, Share
from benchmarks.gpus.group import Alone, Group
from benchmarks.gpus.one_sided import Bags, Tables, bags, compiled, deviation, held, lookup_over, measured, table_values, timed
from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed
from benchmarks.workloads.blocks import drawn_blocks, wide_ids
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.features.row_block import RowBlock

SYSTEMS = ("one-sided", "nccl")
_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Set:
    """`tables` of `rows` rows, `dim` wide, float16."""

    tables: int
    rows: int
    dim: int


def run(
    group: Group,
    sets: Sequence[Set],
    batches: Sequence[int],
    poolings: Sequence[int],
    systems: Sequence[str],
    failed: Failed,
    *,
    seconds: float,
    seed: int,
    alone: bool = True,
) -> Iterator[Record]:
    """A record a system and cell, of all GPUs; and of one alone, if `alone`. The first process has them all."""
    for of in sets:
        if alone and group.size > 1:
            if group.rank == 0:
                yield from _set(Alone(group), of, batches, poolings, systems, failed, seconds, seed)
            group.wait()
        yield from _set(group, of, batches, poolings, systems, failed, seconds, seed)


def _set(
    group: Group, of: Set, batches: Sequence[int], poolings: Sequence[int], systems: Sequence[str], failed: Failed,
    seconds: float, seed: int,
) -> Iterator[Record]:  # fmt: skip
    each = [bags(of.tables, of.rows, of.dim, p) for p in poolings]
    values = table_values(each[0].schema, seed)
    for system in systems:
        run_one = {"one-sided": _one_sided, "nccl": _nccl}[system]
        try:
            yield from run_one(group, of, each, values, batches, seconds, seed)
        except Exception as failure:
            failed(f"{system} {of}", failure)
        group.wait()


def _one_sided(
    group: Group, of: Set, each: Sequence[Bags], values: Tables, batches: Sequence[int], seconds: float, seed: int
) -> Iterator[Record]:
    shared = Placement(group.size, tuple(TablePlacement(t, of.rows, 0, of.rows) for t in values)) if group.size > 1 else None
    with held(group, each[0].schema, values, shared) as store:
        lookups = [lookup_over(store, own.plan) for own in each]
        compiled(group, lookups, batches, pinned=False)
        for own, lookup in zip(each, lookups, strict=True):
            for batch in batches:
                blocks = drawn(own, batch, seed + group.rank)
                times, us, error = measured(
                    group, lookup, own, values, blocks, store.generation, seconds, pinned=False
                )  # fmt: skip
                yield record("tiers", "one-sided", batch=batch, cell=cell_of(group.size, of, own.pooling), times=times,
                             device_us=us, max_abs_err=group.most(error), device_bytes=store.bytes_used,
                             host_bytes=store.host_bytes)  # fmt: skip


def _nccl(
    group: Group, of: Set, each: Sequence[Bags], values: Tables, batches: Sequence[int], seconds: float, seed: int
) -> Iterator[Record]:
    part = -(-of.rows // group.size)
    begin, end = group.rank * part, min(of.rows, (group.rank + 1) * part)
    weight = torch.empty(of.tables, end - begin, of.dim, dtype=torch.float16, device=group.device)
    for to, table in zip(weight, values.values(), strict=True):
        to.copy_(table[begin:end])
    for own in each:
        for batch in batches:
            blocks = drawn(own, batch, seed + group.rank)
            ids = [torch.from_numpy(wide_ids(b)).int().to(group.device) for b in blocks]
            found = []
            for form in FORMS if group.size > 1 else FORMS[:1]:
                lookup = Collective(group, Share(weight, begin), ids, own.pooling, form)
                error = deviation(lookup(0), values, blocks[0], own.pooling)
                found.append((*timed(group, lookup, len(ids), seconds), error, form))
            times, us, error, form = min(found, key=lambda f: f[1])
            yield record("tiers", "nccl", batch=batch, cell=cell_of(group.size, of, own.pooling), times=times, device_us=us,
                         max_abs_err=group.most(error), form=form)  # fmt: skip


def drawn(own: Bags, batch: int, seed: int) -> list[RowBlock]:
    return drawn_blocks(own.schema, batch, _BATCHES, skew="uniform", seed=seed * 100_003 + batch)


def cell_of(gpus: int, of: Set, pooling: int) -> dict[str, object]:
    return {"gpus": gpus, **asdict(of), "zipf": 0.0, "pooling": pooling, "ids": "device"}
