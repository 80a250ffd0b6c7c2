"""Suite `tiers`: the lookup alone, over tables of which a GPU's memory holds a share and the host's memory the rest.

Systems: `one-sided`, ours: the rows read most in HBM, all others read where they lie, in the host's memory, by the same launch;
`replicated`, all rows in HBM: what tables that fit would cost; `host`, no row in HBM, by the same kernel; `cpu-gather`: PyTorch
gathers (and pools) rows on all cores, and copies what came out; `files`: as `one-sided`, with the half of the rows that is read
least in memory-mapped files alone, from which a batch's rows are read before it: a call is the lease, staging and the launch.
The kernel's page cache holds the files. Ids lie in pinned memory, as the engine has them. The frequency of an id says nothing
about its place: `one-sided` goes by ranks.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed
from benchmarks.systems.lookups import batch_of
from benchmarks.timing import Captured, Times, interleaved
from benchmarks.workloads.blocks import drawn_blocks, wide_ids
from benchmarks.workloads.workload import schema_of
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.staging import Staging
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import Attrs, Node, Source
from kernels.dense.linear import padded
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.plan import LookupPlan
from kernels.runtime.state import STATE_WORDS

SYSTEMS = ("one-sided", "replicated", "host", "cpu-gather", "files")
_ONCE = ("host", "cpu-gather", "files")
_LAUNCHES = 8  # of one graph, for device time
_BATCHES = 4
_BATCHES_OF_FILES = 32  # else slots would soon hold all rows of all batches


@dataclass(frozen=True, slots=True)
class Tables:
    """`tables` of `rows` rows, `dim` wide, float16. zipf: the exponent of how often rows are read."""

    tables: int
    rows: int
    dim: int
    zipf: float


@dataclass(frozen=True, eq=False)
class _Drawn:
    schema: FeatureSchema
    plan: LookupPlan
    values: dict[str, torch.Tensor]
    ranks: dict[str, np.ndarray]


def run(
    sets: Sequence[Tables],
    shares: Sequence[float],
    batches: Sequence[int],
    poolings: Sequence[int],
    systems: Sequence[str],
    device: torch.device,
    failed: Failed,
    *,
    seconds: float,
    seed: int,
) -> Iterator[Record]:
    """A record a system, table set, share of the bytes in HBM, batch and pooling."""
    for tables in sets:
        for pooling in poolings:
            drawn = _drawn(tables, pooling, seed)
            blocks = {b: _blocks(drawn, tables, b, seed, _BATCHES) for b in batches}
            for share in shares:
                for system in systems:
                    if (share < 1 and system == "replicated") or (share != min(shares) and system in _ONCE):
                        continue  # the same whatever the share, or slow to set up
                    if share == 1 and system in ("one-sided", "files"):
                        continue
                    try:
                        if system == "files":
                            more = {b: _blocks(drawn, tables, b, seed, _BATCHES_OF_FILES) for b in batches}
                            yield from _measured_files(drawn, tables, share, pooling, more, device, seconds)
                            continue
                        yield from _measured(system, drawn, tables, share, pooling, blocks, device, seconds)
                    except Exception as failure:
                        failed(f"{system} {tables} {share}", failure)


def _drawn(tables: Tables, pooling: int, seed: int) -> _Drawn:
    schema = schema_of((tables.rows,) * tables.tables, tables.dim, dtype="float16", bag=pooling)
    sources = tuple(Source(f.name, f.table, tables.dim) for f in schema.features)
    plan = plan_lookup(Node("lookup", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=sources)), schema)
    rng = np.random.default_rng(seed)
    base = torch.from_numpy(rng.standard_normal((1 << 20, tables.dim), np.float32)).half()
    repeats = -(-tables.rows // len(base))
    values = {t.name: base.roll(i, 0).repeat(repeats, 1)[: tables.rows].contiguous() for i, t in enumerate(schema.tables)}
    ranks = {t.name: rng.permutation(tables.rows).astype(np.uint32) for t in schema.tables}
    return _Drawn(schema, plan, values, ranks)


def _blocks(drawn: _Drawn, tables: Tables, batch: int, seed: int, count: int) -> list[RowBlock]:
    """Ids whose ranks are drawn by Zipf's law."""
    blocks = drawn_blocks(drawn.schema, batch, count, exponent=tables.zipf, seed=seed + batch)
    for feature in drawn.schema.features:
        ranks = drawn.ranks[feature.table or ""]
        at_rank = np.empty_like(ranks)
        at_rank[ranks] = np.arange(len(ranks), dtype=ranks.dtype)
        for block in blocks:
            column = block.column(drawn.schema.columns[feature.name])
            column[:] = at_rank[column]
    return blocks


def _measured(
    system: str,
    drawn: _Drawn,
    tables: Tables,
    share: float,
    pooling: int,
    blocks: dict[int, list[RowBlock]],
    device: torch.device,
    seconds: float,
) -> Iterator[Record]:
    cell = {"gpus": 1, **asdict(tables), "pooling": pooling, "share": {"replicated": 1.0, "host": 0.0}.get(system, share)}
    if system == "cpu-gather":
        cell["share"] = 0.0
        for batch, own in blocks.items():
            call, error = _cpu_gather(drawn, tables, pooling, own, device)
            times = interleaved({system: call}, seconds)[system]
            yield record("tiers", system, batch=batch, cell=cell, times=times, max_abs_err=error)
        return
    store = _store(drawn, tables, system, share, device)
    assert store.descriptors is not None
    lookup = DeviceLookup(drawn.plan, store.descriptors, torch.bfloat16)
    try:
        for batch, own in blocks.items():
            times, us, error = _timed(lookup, drawn, own, pooling, device, seconds)
            yield record("tiers", system, batch=batch, cell=cell, times=times, device_us=us, max_abs_err=error,
                         device_bytes=store.bytes_used, host_bytes=store.host_bytes)  # fmt: skip
    finally:
        torch.cuda.synchronize()
        store.close()


def _measured_files(
    drawn: _Drawn,
    tables: Tables,
    share: float,
    pooling: int,
    blocks: dict[int, list[RowBlock]],
    device: torch.device,
    seconds: float,
) -> Iterator[Record]:
    """Of rows in files: from a block to its looked-up rows."""
    cell = {"gpus": 1, **asdict(tables), "pooling": pooling, "share": share}
    hot, in_files = min(int(tables.rows * share), tables.rows // 2), tables.rows - tables.rows // 2
    placed = tuple(TablePlacement(t.name, t.rows, hot, hot, in_files) for t in drawn.schema.tables)
    with tempfile.TemporaryDirectory() as folder:
        save_file(drawn.values, f"{folder}/tables.safetensors")
        with safe_open(f"{folder}/tables.safetensors", "pt") as file:
            mapped = {t.name: file.get_tensor(t.name) for t in drawn.schema.tables}
        home = Home(Placement(1, placed, drawn.ranks), "benchmark-files", Path("/dev/shm"))
        store = EmbeddingStore(drawn.schema, mapped, device, None, home)
        assert store.descriptors is not None
        lookup = DeviceLookup(store.placed(drawn.plan), store.descriptors, torch.bfloat16)
        try:
            for batch, own in blocks.items():
                staging = Staging(drawn.schema.block_layout, batch)
                x = torch.zeros(batch, padded(drawn.plan.x_width, torch.bfloat16), dtype=torch.bfloat16, device=device)
                state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
                staging.stage(own[:1], batch)
                graph = Captured(
                    lambda staging=staging, batch=batch, x=x, state=state: lookup(staging.batch, batch, x, None, state)
                )

                def call(i: int, own=own, staging=staging, batch=batch, graph=graph) -> None:
                    with leased(store.ahead, [own[i % len(own)]]) as ready:
                        staging.stage(ready, batch)
                        graph()

                call(0)
                torch.cuda.synchronize()
                error = _error(x, drawn, own[0], pooling)
                times = interleaved({"": call}, seconds)[""]
                graph.close()
                yield record("tiers", "files", batch=batch, cell=cell, times=times, max_abs_err=error,
                             device_bytes=store.bytes_used, host_bytes=store.host_bytes)  # fmt: skip
        finally:
            torch.cuda.synchronize()
            store.close()


def _timed(
    lookup: DeviceLookup, drawn: _Drawn, blocks: Sequence[RowBlock], pooling: int, device: torch.device, seconds: float
) -> tuple[Times, float, float]:
    """A call, its device time in a row of launches, and the largest deviation."""
    rows, dtype = blocks[0].rows, torch.bfloat16
    x = torch.zeros(rows, padded(drawn.plan.x_width, dtype), dtype=dtype, device=device)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
    pinned = [batch_of(b, None) for b in blocks]

    def one(i: int) -> None:
        lookup(pinned[i % len(pinned)], rows, x, None, state)

    one(0)
    error = _error(x, drawn, blocks[0], pooling)
    graphs = [Captured(lambda i=i: one(i)) for i in range(len(pinned))]
    many = Captured(lambda: [one(i) for i in range(_LAUNCHES)])
    try:
        return interleaved({"": lambda i: graphs[i % len(graphs)]()}, seconds)[""], many.device_us() / _LAUNCHES, error
    finally:
        for graph in (*graphs, many):
            graph.close()


def _store(drawn: _Drawn, tables: Tables, system: str, share: float, device: torch.device) -> EmbeddingStore:
    if system == "replicated":
        return EmbeddingStore(drawn.schema, drawn.values, device)
    hot = 0 if system == "host" else int(tables.rows * share)
    placed = tuple(TablePlacement(t.name, t.rows, hot, hot) for t in drawn.schema.tables)
    home = Home(Placement(1, placed, {} if system == "host" else drawn.ranks), "benchmark", Path("/dev/shm"))
    return EmbeddingStore(drawn.schema, drawn.values, device, None, home)


def _cpu_gather(
    drawn: _Drawn, tables: Tables, pooling: int, blocks: Sequence[RowBlock], device: torch.device
) -> tuple[Callable[[int], object], float]:
    """Rows gathered by `torch.nn.functional.embedding_bag`, or index_select into pinned memory, on all cores."""
    values = [drawn.values[t.name] for t in drawn.schema.tables]
    rows = blocks[0].rows
    ids = [[torch.from_numpy(wide_ids(b)[:, i * pooling : (i + 1) * pooling]).long().contiguous() for i in range(len(values))]
           for b in blocks]  # fmt: skip
    host = torch.empty(len(values), rows, tables.dim, dtype=torch.float16, pin_memory=True)

    def call(i: int) -> torch.Tensor:
        for table, own, out in zip(values, ids[i % len(ids)], host, strict=True):
            if pooling == 1:
                torch.index_select(table, 0, own[:, 0], out=out)
            else:
                out.copy_(torch.nn.functional.embedding_bag(own, table, mode="sum"))
        on = host.to(device, non_blocking=True).transpose(0, 1).flatten(1).bfloat16()
        torch.cuda.synchronize()
        return on

    return call, _error(call(0), drawn, blocks[0], pooling)


def _error(x: torch.Tensor, drawn: _Drawn, block: RowBlock, pooling: int) -> float:
    """The largest deviation of the first rows from float64 sums.

    Raises:
        AssertionError: it is larger than bfloat16's rounding of the result, and float16's of a sum, allow.
    """
    rows = min(64, block.rows)
    ids = wide_ids(block)[:rows]
    want = torch.cat(
        [
            drawn.values[t.name][torch.from_numpy(ids[:, i * pooling : (i + 1) * pooling]).long()].double().sum(1)
            for i, t in enumerate(drawn.schema.tables)
        ],
        1,
    )
    got = x[:rows, : want.shape[1]].double().cpu()
    worst = float((got - want).abs().max())
    allowed = (2.0**-8 + pooling * 2.0**-10) * float(want.abs().max())
    if not worst <= allowed:
        raise AssertionError(f"tiers: got values off by {worst}, expected at most {allowed}")
    return worst
