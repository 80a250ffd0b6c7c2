"""One kernel, three ways to place tables that a GPU's memory does not hold: which rows lie in every GPU, which in one of them.

Systems: `replicated`, every GPU holds the rows read most, as many as fit, and reads the others in the host's memory;
`partitioned`, GPUs hold different rows, as many as fit into all of them together, and reads the others there; `one-sided`, what
`dpiframe plan` chooses. Row r is read by Zipf's law of the cell. Ids lie in pinned memory, as the engine has them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.gpus.group import Group
from benchmarks.gpus.one_sided import Bags, Tables, bags, compiled, held, lookup_over, measured, table_values
from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed
from benchmarks.timing import Times
from benchmarks.workloads.blocks import drawn_blocks
from dpiframe_core.embedding.place_rows import place_rows
from dpiframe_core.embedding.placement import Links, Placement, TablePlacement, tier_reads
from dpiframe_core.embedding.row_counts import RowCounts, zipf_counts
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from kernels.lookup.embedding import DeviceLookup

SYSTEMS = ("replicated", "partitioned", "one-sided")
_BATCHES = 4
_TURNS = 5
Found = tuple[Times, float, float]  # see `measured`


@dataclass(frozen=True, eq=False)
class _Held:
    placement: Placement
    store: EmbeddingStore
    lookup: DeviceLookup


def run(
    group: Group,
    times_hbm: Sequence[float],
    zipfs: Sequence[float],
    batches: Sequence[int],
    failed: Failed,
    *,
    hbm_bytes: int,
    tables: int,
    dim: int,
    pooling: int,
    links: Links,
    seconds: float,
    seed: int,
) -> Iterator[Record]:
    """A record a system, law, batch, and size of the tables: so many times the memory that a GPU has for them."""
    for factor in times_hbm:
        rows = int(hbm_bytes * factor) // (tables * dim * 2)
        own = bags(tables, rows, dim, pooling)
        values = table_values(own.schema, seed)
        for zipf in zipfs:
            counts = zipf_counts(own.schema, zipf)
            first = (seed + group.rank) * 997
            blocks = {b: drawn_blocks(own.schema, b, _BATCHES, exponent=zipf, seed=first + b) for b in batches}
            cell = {"gpus": group.size, "tables": tables, "rows": rows, "dim": dim, "zipf": zipf, "pooling": pooling,
                    "hbm_mib": hbm_bytes >> 20, "times_hbm": factor}  # fmt: skip
            with ExitStack() as stack:
                there: dict[str, _Held] = {}
                for system in SYSTEMS if group.size > 1 else ("replicated", "one-sided"):
                    try:
                        placement = placed(system, own.schema, counts, group.size, hbm_bytes, links)
                        store = stack.enter_context(held(group, own.schema, values, placement))
                        there[system] = _Held(placement, store, lookup_over(store, own.plan))
                    except Exception as failure:
                        failed(f"{system} {cell}", failure)
                compiled(group, [one.lookup for one in there.values()], batches, pinned=True)
                for batch in batches:
                    measure = partial(_measured, group, own, values, blocks[batch], seconds / _TURNS)
                    for s, found in in_turns({s: partial(measure, one) for s, one in there.items()}, failed).items():
                        (times, us, error), one = found, there[s]
                        yield record("tiers", s, batch=batch, cell=cell, times=times, device_us=us,
                                     max_abs_err=group.most(error), device_bytes=one.store.bytes_used,
                                     host_bytes=one.store.host_bytes, reads=_reads(counts, one.placement))  # fmt: skip
            group.wait()


def _measured(group: Group, of: Bags, tables: Tables, blocks: Sequence[RowBlock], seconds: float, one: _Held) -> Found:
    return measured(group, one.lookup, of, tables, blocks, one.store.generation, seconds, pinned=True)


def in_turns(systems: Mapping[str, Callable[[], Found]], failed: Failed) -> dict[str, Found]:
    """Of each system the turn with the middle p50, which is the same in all processes: turns differ by some percent. One that
    fails takes no part any more.
    """
    turns: dict[str, list[Found]] = {s: [] for s in systems}
    for _ in range(_TURNS):
        for s in [*turns]:
            try:
                turns[s].append(systems[s]())
            except Exception as failure:
                failed(f"{s}, one of its turns", failure)
                del turns[s]
    return {s: sorted(own, key=lambda found: found[0].p50_us)[_TURNS // 2] for s, own in turns.items()}


def placed(system: str, schema: FeatureSchema, counts: RowCounts, gpus: int, hbm_bytes: int, links: Links) -> Placement:
    """Tables of one size that are read alike: each gets the same part of the memory. Lookups know of each how many reads are
    cold.
    """
    if system == "one-sided":
        return place_rows(schema, counts, gpus, hbm_bytes, links)
    fit = hbm_bytes // sum(t.row_bytes for t in schema.tables)
    each = [TablePlacement(t.name, t.rows, min(t.rows, fit), min(t.rows, fit)) for t in schema.tables]
    if system == "partitioned":
        each = [replace(p, hot=0, warm=min(p.rows, fit * gpus)) for p in each]
    simple = Placement(gpus, tuple(each))
    return replace(simple, cold_reads=sum(t.cold for t in tier_reads(counts, simple).values()) / counts.rows)


def _reads(counts: RowCounts, placement: Placement) -> dict[str, float]:
    """The share of all reads that each tier serves."""
    found = list(tier_reads(counts, placement).values())
    total = sum(sum(t) for t in found)
    return {name: round(sum(getattr(t, name) for t in found) / total, 4) for name in ("hot", "warm", "cold")}
