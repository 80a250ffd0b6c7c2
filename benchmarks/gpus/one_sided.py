"""Our lookup over tables that the processes of a run hold together, through the store that serving has; and its check."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpus.group import Group
from benchmarks.systems.lookups import batch_of
from benchmarks.timing import Captured, Times
from benchmarks.workloads.blocks import wide_ids
from benchmarks.workloads.workload import schema_of
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.placement import Placement
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.far_rows.row_source import RowSource
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import Attrs, Node, Source
from kernels.dense.linear import padded
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.plan import LookupPlan
from kernels.runtime.source import loading
from kernels.runtime.state import STATE_WORDS, StateWord

FOLDER = Path("/dev/shm")  # of memory files
LAUNCHES = 8  # of one graph, for device time
_FOUND_S = 60.0  # within which processes have found one another
_CHECKED_ROWS = 64
DTYPE = torch.bfloat16  # of what is looked up, as the first layer takes it
Tables = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Bags:
    """Tables of float16, and bags of as many ids of each, summed."""

    schema: FeatureSchema
    plan: LookupPlan
    pooling: int


def bags(tables: int, rows: int, dim: int, pooling: int) -> Bags:
    schema = schema_of((rows,) * tables, dim, dtype="float16", bag=pooling)
    sources = tuple(Source(f.name, f.table, dim) for f in schema.features)
    node = Node("lookup", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=sources))
    return Bags(schema, plan_lookup(node, schema), pooling)


def table_values(schema: FeatureSchema, seed: int) -> dict[str, torch.Tensor]:
    """Of each table its own rows, of random values that overlap in memory: tables of gigabytes cost that of one."""
    rows, dim, step = schema.tables[0].rows, schema.tables[0].dim, 7919
    rng = np.random.default_rng(seed)
    base = torch.from_numpy(rng.standard_normal((rows + step * len(schema.tables), dim), np.float32)).half()
    return {t.name: base[i * step : i * step + rows] for i, t in enumerate(schema.tables)}


@contextmanager
def held(
    group: Group, schema: FeatureSchema, tables: Tables, placement: Placement | None, source: RowSource | None = None
) -> Iterator[EmbeddingStore]:
    """The store of this process, when it reads the shares of all others. placement: None: all rows in this GPU's memory.
    source: of rows in files.

    Raises:
        RuntimeError: some share is not reached.
    """
    home = None if placement is None else Home(placement, "benchmark", FOLDER, source=source)
    store = EmbeddingStore(schema, tables, group.device, None, home)
    try:
        end = time.monotonic() + _FOUND_S
        while store.shared and store.shares_missing:
            store.refresh(lambda: None, lambda: None)  # no batch runs yet
            if time.monotonic() > end:
                raise RuntimeError(f"shares: got {store.shares_missing} that this GPU does not read, expected all")
            time.sleep(0.02)
        yield store
    finally:
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        group.wait()  # others may still read what this process holds
        store.close()


def lookup_over(store: EmbeddingStore, plan: LookupPlan) -> DeviceLookup:
    assert store.descriptors is not None
    return DeviceLookup(store.placed(plan), store.descriptors, DTYPE)


def compiled(group: Group, lookups: Sequence[DeviceLookup], batches: Sequence[int], *, pinned: bool) -> None:
    """Compiles all that will be launched, several at once, each process its part: the others find it on disk."""
    sources = list(dict.fromkeys(lookup.source(rows, pinned=pinned) for lookup in lookups for rows in batches))
    with loading(sources[group.rank :: group.size]):
        pass
    group.wait()
    with loading(sources):
        pass


def measured(
    group: Group, lookup: DeviceLookup, of: Bags, tables: Tables, blocks: Sequence[RowBlock], generation: int, seconds: float,
    *, pinned: bool, asked: RowBlock | None = None,
) -> tuple[Times, float, float]:  # fmt: skip
    """A call in all processes at once, its device time in a row of launches, and the largest deviation.

    pinned: ids lie in host memory, as the engine has them; else on the device. asked: the first block with ids of rows,
    if those of the blocks may be of slots.
    """
    rows = blocks[0].rows
    x = torch.zeros(rows, padded(of.plan.x_width, DTYPE), dtype=DTYPE, device=group.device)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=group.device)
    state[StateWord.GENERATION] = generation
    batches = [batch_of(b, None if pinned else group.device) for b in blocks]

    def one(i: int) -> None:
        lookup(batches[i % len(batches)], rows, x, None, state)

    one(0)
    error = deviation(x, tables, asked or blocks[0], of.pooling)
    return (*timed(group, one, len(batches), seconds), error)


def timed(group: Group, one: Callable[[int], object], count: int, seconds: float) -> tuple[Times, float]:
    """A call of one(i), captured, and its device time."""
    graphs = [Captured(partial(one, i)) for i in range(count)]
    many = Captured(lambda: [one(i) for i in range(LAUNCHES)])
    try:
        return group.times(lambda i: graphs[i % count](), seconds), group.device_us(many) / LAUNCHES
    finally:
        for graph in (*graphs, many):
            graph.close()


def deviation(x: torch.Tensor, tables: Tables, block: RowBlock, pooling: int) -> float:
    """The largest of the first rows from float64 sums.

    Raises:
        AssertionError: it is larger than the rounding of the result, and of partial sums, allows.
    """
    rows = min(_CHECKED_ROWS, block.rows)
    ids = torch.from_numpy(wide_ids(block)[:rows]).long().view(rows, -1, pooling).unbind(1)
    want = torch.cat([rows_of(t, own).double().sum(1) for t, own in zip(tables.values(), ids, strict=True)], 1)
    got = x[:rows, : want.shape[1]].double().cpu()
    worst = float((got - want).abs().max())
    allowed = (2.0**-8 + pooling * 2.0**-10) * float(want.abs().max())
    if not worst <= allowed:
        raise AssertionError(f"tiers: got values off by {worst}, expected at most {allowed}")
    return worst


def rows_of(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table[ids]
