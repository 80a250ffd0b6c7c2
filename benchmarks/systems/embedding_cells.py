"""What suite `embedding` measures, as plain data: one axis at a time around a centre, and the cells that the aims name."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any

from benchmarks.workloads.dlrm import MLPERF_BAGS, MLPERF_SIZES
from benchmarks.workloads.workload import CRITEO

BATCHES = (1, 16, 64, 256, 1024, 4096, 16384, 65536)
DIMS = (4, 16, 32, 64, 128)
FIELDS = (1, 8, 26, 39, 100)
BAG = 10
WIDE_BATCHES = (4096, 16384)  # at dim 128
MIXED = 0  # for a bag: as many ids of each feature as MLPerf's DLRM-DCNv2 has, 1 to 100, 214 a row
MIXED_DIMS, MIXED_BATCHES, MIXED_ROWS = (64, 128), (1024, 4096, 16384), 4_000_000  # of a table, at most
LARGE_BYTES = 6 << 30  # all tables of a bandwidth cell: a hundred times the L2 of an H200


@dataclass(frozen=True, slots=True)
class Cell:
    """One lookup: `fields` tables of Criteo Kaggle's sizes (again from the first after 26), or, if `large`, of equal size.

    large: tables of `LARGE_BYTES` in all, which no cache holds: the bandwidth cells. bag: ids of each feature, or `MIXED`, over
    tables of MLPerf's sizes.
    """

    batch: int = 1024
    dim: int = 16
    fields: int = 26
    bag: int = 1
    ids: str = "zipf"
    dtype: str = "float32"
    large: bool = False

    def sizes(self, max_rows: int | None = None) -> tuple[int, ...]:
        """Rows of each table, none above `max_rows`."""
        if self.bag == MIXED:
            sizes = tuple(min(n, MIXED_ROWS) for n in MLPERF_SIZES[: self.fields])
        elif self.large:
            sizes = (LARGE_BYTES // (self.fields * self.row_bytes),) * self.fields
        else:
            sizes = tuple(islice(cycle(CRITEO[:26]), self.fields))
        return tuple(min(n, max_rows or n) for n in sizes)

    @property
    def bags(self) -> tuple[int, ...]:
        """Ids of each feature."""
        return MLPERF_BAGS[: self.fields] if self.bag == MIXED else (self.bag,) * self.fields

    @property
    def part(self) -> str:
        """Of the suite: what a run may be asked for alone."""
        return "bags" if self.bag == MIXED else "large" if self.large else "sweep"

    @property
    def against_gather(self) -> bool:
        """Whether a plain gather of the same rows is the yardstick."""
        return self.large or self.bag == MIXED

    @property
    def row_bytes(self) -> int:
        return self.dim * {"float32": 4, "float16": 2, "int8": 1}[self.dtype]

    @property
    def bytes_moved(self) -> int:
        """Rows and ids read, outputs written: float32 from float32 tables, else bfloat16."""
        out = self.dim * (4 if self.dtype == "float32" else 2)
        return self.batch * (sum(self.bags) * (self.row_bytes + 4) + self.fields * out)

    @property
    def gathered_bytes(self) -> int:
        """What a plain gather of the same rows moves: ids and rows read, rows written."""
        return self.batch * sum(self.bags) * (4 + 2 * self.row_bytes)

    def named(self) -> dict[str, Any]:
        """The fields of a record's `cell`: all but the batch."""
        return {k: v for k, v in asdict(self).items() if k != "batch"}


def sweep(dtypes: Sequence[str], batches: Sequence[int] = BATCHES) -> list[Cell]:
    """Every cell once, those of the same tables next to one another."""
    cells = dict.fromkeys(c for dtype in dtypes for c in _of(dtype, batches))
    return sorted(cells, key=lambda c: (dtypes.index(c.dtype), c.large, c.bag == MIXED, c.dim, c.fields))


def _of(dtype: str, batches: Sequence[int]) -> Iterator[Cell]:
    centre = Cell(dtype=dtype)
    yield from (replace(centre, batch=b) for b in batches)
    yield from (replace(centre, dim=128, batch=b) for b in WIDE_BATCHES)
    if dtype != "float32":
        yield from (Cell(b, d, 26, MIXED, "uniform", dtype) for d in MIXED_DIMS for b in MIXED_BATCHES)
    if dtype == "int8":
        return
    yield from (replace(centre, dim=d) for d in DIMS)
    yield from (replace(centre, fields=f) for f in FIELDS)
    yield replace(centre, bag=BAG)
    yield replace(centre, ids="uniform")
    yield from (Cell(65536, d, 26, 1, "uniform", dtype, large=True) for d in (16, 128))
