"""Tables as large as GPUs and host hold together, placed as `dpiframe plan` places them: what a request's lookup takes.

Rows repeat those of one file in memory (`repeated`), so that no memory but where they lie has to hold them. Where the host's
memory is not to hold the rest, those read least are in files, as the plan has them: they are read from that file, as from any
that lies in the kernel's page cache.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.gpus import one_sided
from benchmarks.gpus.group import Group
from benchmarks.gpus.loading import stages
from benchmarks.gpus.one_sided import DTYPE, bags, compiled, held, lookup_over, measured
from benchmarks.gpus.repeated import repeated
from benchmarks.records.record import Record, record
from benchmarks.timing import Times, times_of
from benchmarks.workloads.blocks import drawn_blocks
from dpiframe_core.embedding.place_rows import place_rows
from dpiframe_core.embedding.placement import Links, tier_reads
from dpiframe_core.embedding.row_counts import zipf_counts
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.staging import Staging
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.far_rows.row_source import FileRows
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import padded
from kernels.lookup.embedding import DeviceLookup
from kernels.runtime.state import STATE_WORDS, StateWord

_BATCHES = 8
_NEW = 64  # blocks, of rows in files


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
    with ExitStack() as stack:
        values = stack.enter_context(repeated([t.name for t in own.schema.tables], rows, dim, seed))
        source = FileRows([*values.values()]) if in_files else None
        spent = stack.enter_context(stages())
        mapped = time.perf_counter()
        store = stack.enter_context(held(group, own.schema, values, placement, source))
        ready = group.most(time.perf_counter() - mapped)
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
