"""A plan of where the rows of the tables lie, hot, warm and cold, and the time that a lookup is predicted to take by it.

Plain data: it is found by `place_rows`, kept by `placement_file`, carried out by the store.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpiframe_core.embedding.frequency import Ranks
from dpiframe_core.embedding.row_counts import Counts, RowCounts
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema

RANK_BYTES = 4
_PART = 1 << 16  # rows
_MIB = 1 << 20
HOST_WAITS = (  # an H200's, rows of 128 bytes
    (512 * _MIB, 2.6e-9), (768 * _MIB, 5.4e-9), (1024 * _MIB, 9.5e-9), (1536 * _MIB, 14.5e-9), (2048 * _MIB, 17.3e-9),
    (4096 * _MIB, 21.1e-9),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Links:
    """What one GPU reads of random rows over each link, bytes/s. The defaults were measured on H200s and H100s.

    Attributes:
        local: its own HBM. peer: other GPUs' HBM, all of them together. host: pinned host memory, read in place.
        least_bytes: what a read moves comes in multiples of this; a row of 4 bytes takes no less than one of 32.
        host_waits: (bytes, seconds), both rising: the least that a read of the host takes where cold rows lie over so many
            bytes, in proportion between two of them. Address translations of some hundred MB are held near the GPU; a read
            of any other row waits for its own.
    """

    local: float = 1.7e12
    peer: float = 366e9
    host: float = 50e9
    least_bytes: int = 32
    host_waits: tuple[tuple[float, float], ...] = HOST_WAITS

    def __post_init__(self) -> None:
        for name in ("local", "peer", "host", "least_bytes"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise InputError(f"links.{name}", value, "a finite number above 0")
        if any(list(each) != sorted(each) for each in zip(*self.host_waits, strict=True)):
            raise InputError("links.host_waits", self.host_waits, "rising numbers of bytes, and of seconds")

    def moved(self, row_bytes: int) -> int:
        """The bytes that a read of one row moves."""
        return -(-row_bytes // self.least_bytes) * self.least_bytes

    def host_s(self, row_bytes: int, spread: float = math.inf) -> float:
        """Seconds that a read of one row of the host takes, where all those lie over `spread` bytes."""
        bytes_s = self.moved(row_bytes) / self.host
        if not self.host_waits:
            return bytes_s
        spreads, waits = zip(*self.host_waits, strict=True)
        return max(bytes_s, float(np.interp(spread, spreads, waits)))

    def seconds(self, gpus: int, hot: float, warm: float, cold_s: float) -> "Tiers":
        """How long each link (local, peer, host) is busy for bytes moved from hot and warm rows, and seconds for cold ones."""
        return Tiers((hot + warm / gpus) / self.local, warm * (gpus - 1) / gpus / self.peer, cold_s)


class Tiers(NamedTuple):
    """A value for each tier: rows that lie on every GPU, on one of the GPUs, in host memory. Of links: local, peer, host."""

    hot: float
    warm: float
    cold: float


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """Where a table's rows lie by their rank, the most read one first.

    Attributes:
        hot: ranks [0, hot) lie in every GPU's HBM.
        warm: ranks [hot, warm) lie in one GPU's HBM, equal contiguous shares in the order of the GPUs; the last
            ones may be smaller.
        rows: of the table. Ranks [warm, held) lie in host memory.
        in_files: rows that no memory holds, those read least: ranks [held, rows) lie in the bundle's files alone.
    """

    table: str
    rows: int
    hot: int
    warm: int
    in_files: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.hot <= self.warm <= self.held <= self.rows:
            got, expected = (self.hot, self.warm, self.held, self.rows), "0 <= hot <= warm <= rows - in_files <= rows"
            raise InputError(f"tables.{self.table}", got, expected)

    @property
    def held(self) -> int:
        """Ranks below it lie in some memory."""
        return self.rows - self.in_files

    def tiers(self, ranks: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
        """Where the row of each rank lies: 0 hot, 1 warm, 2 in host memory, 3 in files."""
        return sum(((ranks >= end).astype(np.intp) for end in (self.hot, self.warm, self.held)), np.zeros(len(ranks), np.intp))

    def share(self, gpus: int) -> int:
        """Rows of a GPU's share of the warm ones, the largest of them."""
        return -(-(self.warm - self.hot) // gpus)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Filled by `place_rows` and `read_placement`.

    Attributes:
        tables: in the schema's order.
        ranks: by table, uint32[rows]: the rank of each row. Of the tables that lie in several places and whose rows are not in
            the order of falling frequency; elsewhere a row's id is its rank. Each GPU's HBM holds them.
        cold_reads: reads of rows that no HBM holds, for a scored row in the mean; inf: not known.
    """

    gpus: int
    tables: tuple[TablePlacement, ...]
    ranks: Mapping[str, Ranks] = field(default_factory=dict)
    cold_reads: float = math.inf

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise InputError("gpus", self.gpus, "at least 1")
        if not self.cold_reads >= 0:
            raise InputError("cold_reads", self.cold_reads, "0 or more")
        rows = {t.table: t.rows for t in self.tables}
        for t in self.tables:
            if self.gpus == 1 and t.warm > t.hot:
                raise InputError(f"tables.{t.table}", (t.hot, t.warm), "no warm rows on a single GPU")
        for name, ranks in self.ranks.items():
            if ranks.shape != (rows.get(name),) or ranks.dtype != np.uint32:
                expected = f"uint32[{rows[name]}]" if name in rows else f"one of the tables {sorted(rows)}"
                raise InputError(f"ranks.{name}", f"{ranks.dtype}{list(ranks.shape)}", expected)

    def check(self, schema: FeatureSchema) -> None:
        """Raises InputError unless it is of the schema's tables, in their order."""
        got, expected = [(t.table, t.rows) for t in self.tables], [(t.name, t.rows) for t in schema.tables]
        if [name for name, _ in got] != [name for name, _ in expected]:
            raise InputError("tables", [name for name, _ in got], f"the model's, {[name for name, _ in expected]}")
        for (name, rows), (_, wanted) in zip(got, expected, strict=True):
            if rows != wanted:
                raise InputError(f"tables.{name}.rows", rows, f"{wanted}, as the model has")

    def gpu_bytes(self, schema: FeatureSchema) -> int:
        """What the fullest GPU holds: hot rows, its share of the warm ones, ranks, scales of int8 tables."""
        rows = sum((p.hot + p.share(self.gpus)) * schema.table(p.table).row_bytes for p in self.tables)
        return rows + sum(t.scale_bytes for t in schema.tables) + RANK_BYTES * sum(map(len, self.ranks.values()))

    def host_bytes(self, schema: FeatureSchema) -> int:
        """The cold rows. Copies of warm ones, for the day when a GPU is lost, come on top."""
        return sum((p.held - p.warm) * schema.table(p.table).row_bytes for p in self.tables)

    def file_reads(self, counts: RowCounts) -> float:
        """The share of all reads that no memory serves."""
        total = held = 0
        for p in self.tables:
            reads, ranks = counts.tables[p.table], self.ranks.get(p.table)
            own = int(reads.sum())
            total += own
            held += (
                own if not p.in_files else int(reads[: p.held].sum()) if ranks is None else reads_before(p.held, reads, ranks)
            )
        return 1 - held / total if total else 0.0


def uniform(schema: FeatureSchema, gpus: int = 1, *, hot: bool) -> Placement:
    """All rows on every GPU, or all in host memory: what a placement is compared with."""
    return Placement(gpus, tuple(TablePlacement(t.name, t.rows, *(2 * (t.rows if hot else 0,))) for t in schema.tables))


def tier_reads(counts: RowCounts, placement: Placement) -> dict[str, Tiers]:
    """By table, how many reads each tier serves."""
    found = {}
    for p in placement.tables:
        reads, ranks = counts.tables[p.table], placement.ranks.get(p.table)
        if ranks is None:
            hot, warm = int(reads[: p.hot].sum()), int(reads[p.hot : p.warm].sum())
        else:
            hot = reads_before(p.hot, reads, ranks)
            warm = reads_before(p.warm, reads, ranks) - hot if p.warm > p.hot else 0
        found[p.table] = Tiers(hot, warm, int(reads.sum()) - hot - warm)
    return found


def reads_before(end: int, reads: Counts, ranks: Ranks) -> int:
    """Reads of rows of a rank below `end`; by parts that stay in a core's cache, which is eight times as fast as at once."""
    parts = (slice(start, start + _PART) for start in range(0, len(ranks), _PART))
    return sum(int((reads[part] * (ranks[part] < end)).sum()) for part in parts)


def predicted_links(schema: FeatureSchema, counts: RowCounts, placement: Placement, links: Links | None = None) -> Tiers:
    """Seconds that each link (local, peer, host) is busy for one scored row in the mean.

    Raises:
        InputError: counts or placement are not of this schema.
    """
    links = links or Links()
    counts.check(schema)
    placement.check(schema)
    spread = placement.host_bytes(schema)
    hot = warm = cold_s = 0.0
    for name, reads in tier_reads(counts, placement).items():
        size = schema.table(name).row_bytes
        hot += links.moved(size) * reads.hot
        warm += links.moved(size) * reads.warm
        cold_s += links.host_s(size, spread) * reads.cold
    return Tiers(*(seconds / counts.rows for seconds in links.seconds(placement.gpus, hot, warm, cold_s)))
