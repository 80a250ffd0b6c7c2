"""Tables as large as GPUs and host hold together, placed as `dpiframe plan` places them: what a request's lookup takes.

Rows repeat a pattern, so that no memory but where they lie has to hold them: 2^20 different rows, each table's from another on.
"""

import time
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch

from benchmarks.gpus.group import Group
from benchmarks.gpus.loading import stages
from benchmarks.gpus.one_sided import bags, compiled, held, lookup_over, measured
from benchmarks.records.record import Record, record
from benchmarks.workloads.blocks import drawn_blocks
from dpiframe_core.embedding.place_rows import place_rows
from dpiframe_core.embedding.placement import Links, tier_reads
from dpiframe_core.embedding.row_counts import zipf_counts

_PATTERN = 1 << 20  # rows
_COPIED = 64 << 20  # bytes of rows that the store copies at once
_BATCHES = 8


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
) -> Iterator[Record]:
    """A record a batch of rows with one id a table. Ids lie in pinned memory."""
    rows = total_bytes // (tables * dim * 2)
    own = bags(tables, rows, dim, 1)
    values = repeated([t.name for t in own.schema.tables], rows, dim, seed)
    begin = time.perf_counter()
    counts = zipf_counts(own.schema, zipf)
    placement = place_rows(own.schema, counts, group.size, hbm_bytes, links)
    planned = time.perf_counter()
    reads = [sum(t) for t in zip(*tier_reads(counts, placement).values(), strict=True)]
    hot, warm, cold = (round(r / sum(reads), 4) for r in reads)
    with stages() as spent, held(group, own.schema, values, placement) as store:
        ready = group.most(time.perf_counter() - planned)
        lookup = lookup_over(store, own.plan)
        compiled(group, [lookup], batches, pinned=True)
        for batch in batches:
            blocks = drawn_blocks(own.schema, batch, _BATCHES, exponent=zipf, seed=(seed + group.rank) * 997 + batch)
            times, us, error = measured(group, lookup, own, values, blocks, store.generation, seconds, pinned=True)
            cell = {"gpus": group.size, "tables": tables, "rows": rows, "dim": dim, "zipf": zipf, "pooling": 1,
                    "hbm_mib": hbm_bytes >> 20, "times_hbm": round(total_bytes / hbm_bytes, 3)}  # fmt: skip
            yield record("tiers-large", "one-sided", batch=batch, cell=cell, times=times, device_us=us,
                         max_abs_err=group.most(error), device_bytes=store.bytes_used, host_bytes=store.host_bytes,
                         all_rows=rows * tables, table_bytes=total_bytes, plan_s=round(planned - begin, 2),
                         ready_s=round(ready, 2), stages_s=dict(spent), hot=hot, warm=warm, cold=cold)  # fmt: skip
