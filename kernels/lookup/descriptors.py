"""Where a model's embedding tables lie, as a lookup on a GPU reads it (unit_records.cuh): a table's rows in segments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch


def record(fields: str) -> np.dtype[np.void]:
    """A structure of unit_records.cuh: "name type, name type, .."."""
    return np.dtype([tuple(field.split()) for field in fields.split(", ")])


TABLE = record("base <u8, end <i8, rows <i8, scale <u8, next <i4, segments <i4, ranks <u8")
_SEGMENT = record("base <u8, end <i8")
# Bytes of the host's memory of which a GPU reads any rows at the speed of its link, or nearly so: it holds translations of some
# 550 MB, and over 1 GB is four times as slow. One translation in ten missed costs less than to go table by table where few rows
# are cold (1,024 rows of 16 bags of 8 on two H200s, 0.1 % of the reads cold: 20 us and 28).
REACH = 576 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [end of the segment before, end) of a table, consecutive from the device-readable address `base`."""

    base: int
    end: int


def segment_descriptors(
    tables: Sequence[Sequence[Segment]], scales: Sequence[int] = (), ranks: Sequence[int] = (), rows: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The byte images (uint8) of one generation: a record a table with its first segment inline, and the list of all segments.

    Args:
        scales: the address of each table's float32[dim] scale, a multiple of 16; 0 where a table is not int8. (): none is.
        ranks: the address of each table's uint32[rows], at which place among its rows each lies; 0 or (): in order of ids.
        rows: of each table, below which ids are; (): the end of its last segment. Ranks may lead to places behind them.

    Raises:
        ValueError: a table has no segment, its segments are not ascending, or they do not hold its rows.
    """
    ends = [[s.end for s in t] for t in tables]
    for i, e in enumerate(ends):
        if not e or e != sorted(set(e)) or e[0] < 1:
            raise ValueError(f"table {i}: got segment ends {e}, expected at least one, ascending from 1")
    rows = rows or [e[-1] for e in ends]
    for i, (e, n) in enumerate(zip(ends, rows, strict=True)):
        if not 1 <= n <= e[-1]:
            raise ValueError(f"table {i}: got {n} rows, expected 1 to {e[-1]}, as many as its segments hold")
    firsts = np.cumsum([0, *(len(e) for e in ends)])
    none = [0] * len(tables)
    each = zip(tables, rows, scales or none, firsts, ranks or none, strict=False)
    records = [(t[0].base, t[0].end, n, scale, first + 1, len(t), rank) for t, n, scale, first, rank in each]
    listed = [(s.base, s.end) for t in tables for s in t]
    return np.array(records, TABLE).view(np.uint8), np.array(listed, _SEGMENT).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Device memory with two generations of segment descriptors, one after the other; a lane's state[GENERATION] picks one.
    After a change lookups are to `place` themselves anew.

    tables: uint8[2 * n_tables * 48]; segments: uint8[2 * n_segments * 16]; out_of_range: int64[1], ids refused so far.
    tiers: whether some table has several segments, or ranks. Lookups are compiled for it. spread: bytes of the host's memory
    over which the rows lie that are read there, and cold_reads how many a scored row has of them in the mean: beyond `REACH`
    many reads go table by table.
    """

    tables: torch.Tensor
    segments: torch.Tensor
    out_of_range: torch.Tensor
    tiers: bool
    spread: int = 0
    cold_reads: float = math.inf

    @property
    def n_tables(self) -> int:
        return self.tables.numel() // (2 * TABLE.itemsize)

    @property
    def n_segments(self) -> int:
        return self.segments.numel() // (2 * _SEGMENT.itemsize)


def descriptors(
    generations: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device, spread: int = 0, cold_reads: float = math.inf
) -> Descriptors:
    """On a device, of two generations of `segment_descriptors`."""
    tables, segments = (np.concatenate(images) for images in zip(*generations, strict=True))
    records = tables.view(TABLE)
    tiers = bool((records["segments"] > 1).any() or records["ranks"].any())
    on = partial(torch.Tensor.to, device=device)
    return Descriptors(
        on(torch.from_numpy(tables)), on(torch.from_numpy(segments)), torch.zeros(1, dtype=torch.int64, device=device), tiers,
        spread, cold_reads,
    )  # fmt: skip


def whole(tables: Sequence[torch.Tensor], scales: Sequence[torch.Tensor | None], device: torch.device) -> Descriptors:
    """Both generations alike, each table one segment. scales: of each table, None where it is not int8; (): none is."""
    addresses = [0 if s is None else s.data_ptr() for s in scales]
    images = segment_descriptors([[Segment(t.data_ptr(), t.shape[0])] for t in tables], addresses)
    return descriptors((images, images), device)
