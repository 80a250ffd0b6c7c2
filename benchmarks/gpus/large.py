"""Tables as large as GPUs and host hold together, placed as `dpiframe plan` places them: what a request's lookup takes.

Rows repeat a pattern, so that no memory but where they lie has to hold them: 2^20 different rows, each table's from another on.
Where the host's memory is not to hold the rest, those read least are in files, as the plan has them. There are no such files: a
row of them is made when it is asked for. So no disk has to hold them, and none is measured.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch

from benchmarks.gpus import one_sided
from benchmarks.gpus.group import Group
from benchmarks.gpus.loading import stages
from benchmarks.gpus.one_sided import DTYPE, bags, compiled, held, lookup_over, measured
from benchmarks.records.record import Record, record
from benchmarks.timing import Times, times_of
from benchmarks.workloads.blocks import drawn_blocks
from dpiframe_core.embedding.place_rows import place_rows
from dpiframe_core.embedding.placement import Links, tier_reads
from dpiframe_core.embedding.row_counts import zipf_counts
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.staging import Staging
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.far_rows.row_source import FileRows, Wanted
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import padded
from kernels.lookup.embedding import DeviceLookup
from kernels.runtime.state import STATE_WORDS, StateWord

_PATTERN = 1 << 20  # rows
_COPIED = 64 << 20  # bytes of rows that the store copies at once
_BATCHES = 8
_NEW = 64  # blocks, of rows in files


class Repeats:
    """Rows of such tables in the place of files."""

    mapped = None

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        self._tables, self.parts = tables, FileRows(()).parts

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [self._tables[table][torch.from_numpy(ids)] for table, ids in wanted]

    def close(self) -> None:
        """They are nobody's."""


class Repeated:
    """In the place of a table [rows, dim] in host memory, as far as the store reads one: rows [a, b) of it, and single ones."""

    def __init__(self, rows: int, pattern: torch.Tensor, shift: int) -> None:
        self.shape, self.dtype, self._pattern, self._shift = (rows, pattern.shape[1]), pattern.dtype, pattern, shift

    def element_size(self) -> int:
        return self._pattern.element_size()

    def __getitem__(self, at: slice | torch.Tensor) -> torch.Tensor:
        if isinstance(at, torch.Tensor):
            return self._pattern[(at + self._shift) % _PATTERN]
        begin = (at.start + self._shift) % _PATTERN
        return self._pattern[begin : begin + at.stop - at.start]


def repeated(names: Sequence[str], rows: int, dim: int, seed: int) -> dict[str, torch.Tensor]:
    """float16 tables; the pattern goes on as far as is copied at once."""
    values = np.random.default_rng(seed).standard_normal((_PATTERN, dim), np.float32)
    pattern = torch.from_numpy(values).half()
    pattern = torch.cat([pattern, pattern[: _COPIED // (2 * dim)]])
    return {name: cast(torch.Tensor, Repeated(rows, pattern, 7919 * i)) for i, name in enumerate(names)}


def run(
    group: Group,
    total_bytes: int,
    hbm_bytes: int,
    batches: Sequence[int],
    *,
    tables: int,
    dim: int,
    zipf: float,
    links: Links,
    seconds: float,
    seed: int,
    host_bytes: int | None = None,
) -> Iterator[Record]:
    """A record a batch of rows with one id a table. Ids lie in pinned memory. Rows in files were read before. If there are any,
    a second record, system `files`, is of blocks that come for the first time: the lease, the wait, staging and the launch.

    host_bytes: of the host's memory for all processes; None: for all rows that are not hot.
    """
    rows = total_bytes // (tables * dim * 2)
    own = bags(tables, rows, dim, 1)
    values = repeated([t.name for t in own.schema.tables], rows, dim, seed)
    begin = time.perf_counter()
    counts = zipf_counts(own.schema, zipf)
    placement = place_rows(own.schema, counts, group.size, hbm_bytes, links, host_bytes)
    planned = time.perf_counter()
    reads = [sum(t) for t in zip(*tier_reads(counts, placement).values(), strict=True)]
    hot, warm, cold = (round(r / sum(reads), 4) for r in reads)
    files = round(placement.file_reads(counts), 4)
    cell = {"gpus": group.size, "tables": tables, "rows": rows, "dim": dim, "zipf": zipf, "pooling": 1,
            "hbm_mib": hbm_bytes >> 20, "times_hbm": round(total_bytes / hbm_bytes, 3)}  # fmt: skip
    in_files = sum(p.in_files for p in placement.tables) * 2 * dim
    cell |= {"files_mib": in_files >> 20} if in_files else {}
    source = Repeats([*values.values()]) if in_files else None
    with stages() as spent, held(group, own.schema, values, placement, source) as store:
        ready = group.most(time.perf_counter() - planned)
        lookup = lookup_over(store, own.plan)
        compiled(group, [lookup], batches, pinned=True)
        sizes = {"device_bytes": store.bytes_used, "host_bytes": store.host_bytes, "all_rows": rows * tables,
                 "table_bytes": total_bytes, "plan_s": round(planned - begin, 2), "ready_s": round(ready, 2),
                 "stages_s": dict(spent), "hot": hot, "warm": warm, "cold": round(cold - files, 4), "files": files}  # fmt: skip
        for batch in batches:
            draw = partial(drawn_blocks, own.schema, batch, exponent=zipf)
            blocks = draw(_BATCHES, seed=(seed + group.rank) * 997 + batch)
            with leased(store.ahead, blocks) as there:
                times, us, error = measured(group, lookup, own, values, there, store.generation, seconds, pinned=True,
                                            asked=blocks[0])  # fmt: skip
            yield record("tiers-large", "one-sided", batch=batch, cell=cell, times=times, device_us=us,
                         max_abs_err=group.most(error), **sizes)  # fmt: skip
            if store.ahead is not None:
                new = draw(_NEW, seed=(seed + group.rank) * 997 + batch + 1)
                yield record("tiers-large", "files", batch=batch, cell=cell, times=_from_files(group, lookup, store, new),
                             **sizes)  # fmt: skip


def _from_files(group: Group, lookup: DeviceLookup, store: EmbeddingStore, blocks: Sequence[RowBlock]) -> Times:
    """From blocks whose rows in files nobody has read yet to their looked-up rows, in all processes at once."""
    rows = blocks[0].rows
    staging = Staging(blocks[0].layout, rows)
    staging.stage_zeros(rows)  # ids of rows in files lead nowhere until they are leased
    x = torch.zeros(rows, padded(lookup.plan.x_width, DTYPE), dtype=DTYPE, device=group.device)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=group.device)
    state[StateWord.GENERATION] = store.generation
    graph = one_sided.Captured(lambda: lookup(staging.batch, rows, x, None, state))
    spent = []
    group.wait()
    try:
        for block in blocks:
            begin = time.perf_counter()
            with leased(store.ahead, [block]) as there:
                staging.stage(there, rows)
                graph()
            spent.append(time.perf_counter() - begin)
    finally:
        graph.close()
    return times_of(group.pooled(spent))
