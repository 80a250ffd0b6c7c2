"""Suite `tiers-promotion`: lookups on a CPU over tables of which memory is to hold a small share and files hold the rest, while
which rows are read most changes.

Systems: `slots`: rows of files lie in the slots of `ahead_mib` until others need them, as without `replan_s`; `promoted`: those
that are asked for most stay. Both have the same memory, files, plan and requests, one after the other. A call is a request: its
lease, the wait for its rows, the lookup. The files lie in the page cache; with `disk_us` each row that is read takes so long on
top, as on a disk, eight at once. The plan is right until half of the requests are over; then any rows may be read most. What an
engine's thread does each `replan_s` is done each so many requests, between two calls, and its time on the processor taken.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed
from benchmarks.timing import times_of
from benchmarks.workloads.blocks import drawn_blocks
from benchmarks.workloads.workload import drawn_tables, schema_of
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.far_rows.row_source import FileRows, Wanted
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import Attrs, Node, Source
from dpiframe_core.replan.replanner import Replanner
from kernels.lookup.mapped_lookup import MappedLookup
from kernels.lookup.plan import LookupPlan

SYSTEMS = ("slots", "promoted")
_TABLES, _ROWS, _DIM = 4, 250_000, 64
_MEBI = 1 << 20
_NEVER_S = 1e9  # by the clock: a request is slower here than there, and the share that is read in files is not to depend on it
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Traffic:
    """`requests`, and after how many rows may change places. zipf: exponent of how often rows are read. held, slots: for which
    shares of a table's rows there is memory, by the plan and for rows of files. disk_us: of each row that is read in a file.
    """

    zipf: float
    held: float
    slots: float
    disk_us: float
    requests: int
    replan_every: int

    @property
    def windows(self) -> dict[str, tuple[int, int]]:
        """First and last request of what is told apart: before the change, after it, and once that is long ago."""
        half = self.requests // 2
        return {"planned": (half // 2, half), "changed": (half, half + half // 4), "later": (half + half // 2, self.requests)}


class _Disk(FileRows):
    def __init__(self, tables: Sequence[torch.Tensor], row_us: float) -> None:
        super().__init__(tables)
        self._row_s = row_us * 1e-6
        if row_us:
            self.mapped = None

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        if self._row_s:
            time.sleep(self._row_s * sum(len(w.ids) for w in wanted))
        return super().read(wanted)


class _System:
    """One of the systems, on files of its own mapping. Counts what each request had to read."""

    def __init__(self, path: str, schema: FeatureSchema, plan: LookupPlan, traffic: Traffic, *, promotes: bool) -> None:
        with safe_open(path, "pt") as file:
            mapped = {t.name: file.get_tensor(t.name) for t in schema.tables}
        held = int(_ROWS * traffic.held)
        places = tuple(TablePlacement(t.name, _ROWS, 1, 1, _ROWS - held) for t in schema.tables)
        nbytes = int(_ROWS * traffic.slots) * sum(t.row_bytes for t in schema.tables)
        source = _Disk([mapped[t.name] for t in schema.tables], traffic.disk_us)
        home = Home(Placement(1, places), "promotion", None, nbytes, source, replan_s=_NEVER_S if promotes else None)
        self.store = EmbeddingStore(schema, mapped, _CPU, None, home)
        assert self.store.ahead is not None
        self.ahead = self.store.ahead
        self._lookup = MappedLookup(plan, self.store.tables, self.store.scales, spares=self.store.spares)
        self._replanner = Replanner(schema, None, self.ahead, home, lambda: None) if promotes else None
        self.seconds: list[float] = []
        self.files: list[int] = []
        self.planned_s: list[float] = []
        self.x: torch.Tensor | None = None

    def score(self, block: RowBlock) -> None:
        before, start = self.ahead.found.file, time.perf_counter()
        with leased(self.ahead, [block]) as (ready,):
            self.x, _ = self._lookup.read(ready)
            self.seconds.append(time.perf_counter() - start)
        self.files.append(self.ahead.found.file - before)

    def replan(self) -> None:
        if self._replanner is not None:
            start = time.process_time()
            self._replanner.step()
            self._replanner.move()
            self.planned_s.append(time.process_time() - start)

    def count(self) -> None:
        """As an engine's thread does twice a second."""
        if self._replanner is not None:
            self._replanner.step()


def run(traffics: Sequence[Traffic], batch: int, failed: Failed, *, seed: int) -> Iterator[Record]:
    """A record a system, exponent, disk and part of the requests."""
    schema = schema_of((_ROWS,) * _TABLES, _DIM, dtype="float16")
    sources = tuple(Source(f.name, f.table, _DIM) for f in schema.features)
    plan = plan_lookup(Node("lookup", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=sources)), schema)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tables.safetensors"
        values = drawn_tables(schema, _CPU, seed)
        save_file({name: own.contiguous() for name, own in values.items()}, path)
        for traffic in traffics:
            try:
                yield from _measured(path, values, schema, plan, traffic, batch, seed)
            except Exception as failure:
                failed(f"{traffic}", failure)


def _measured(
    path: str,
    values: dict[str, torch.Tensor],
    schema: FeatureSchema,
    plan: LookupPlan,
    traffic: Traffic,
    batch: int,
    seed: int,
) -> Iterator[Record]:
    systems = {name: _System(path, schema, plan, traffic, promotes=name == "promoted") for name in SYSTEMS}
    asked: list[int] = []
    error = 0.0
    for i, block in enumerate(_requests(schema, traffic, batch, seed)):
        ids = block.wide_ids("candidate_ids")
        asked.append(sum(len(np.unique(column)) for column in ids.T))
        for name in list(systems)[:: -1 if i % 2 else 1]:
            systems[name].score(block)
        for own in systems.values():
            if i % traffic.replan_every == traffic.replan_every - 1:
                own.replan()
            elif i % 32 == 31:
                own.count()
        if i % 97 == 0:
            want = torch.cat([values[t.name][torch.from_numpy(ids[:, k])] for k, t in enumerate(schema.tables)], 1).float()
            error = max(error, *(float((own.x - want).abs().max()) for own in systems.values() if own.x is not None))
    for name, own in systems.items():
        for window, (start, end) in traffic.windows.items():
            found = own.ahead.found
            yield record("tiers-promotion", name, batch=batch, cell=asdict(traffic) | {"part": window},
                         times=times_of(own.seconds[start:end]), max_abs_err=error,
                         p50_file_rows=float(np.percentile(own.files[start:end], 50)),
                         p99_file_rows=float(np.percentile(own.files[start:end], 99)),
                         file_share=round(sum(own.files[start:end]) / sum(asked[start:end]), 4),
                         slots_mib=round(sum(s.nbytes for s in own.store.spares if s is not None) / _MEBI, 1),
                         tables_mib=round(sum(v.nbytes for v in values.values()) / _MEBI, 1), staying=found.staying,
                         replan_ms=round(1e3 * float(np.median(own.planned_s)), 1) if own.planned_s else None)  # fmt: skip
        own.store.close()


def _requests(schema: FeatureSchema, traffic: Traffic, batch: int, seed: int) -> Iterator[RowBlock]:
    """Ids in the order of the plan, then in any other."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(_ROWS) for _ in schema.features]
    for i in range(traffic.requests):
        (block,) = drawn_blocks(schema, batch, 1, exponent=traffic.zipf, seed=seed + i)
        if i >= traffic.requests // 2:
            for feature, order in zip(schema.features, orders, strict=True):
                column = block.column(schema.columns[feature.name])
                column[:] = order[column]
        yield block
