"""How a lookup's launch on a GPU is cut into blocks and threads: plain arithmetic, fitted to measurements. Knows no tensors."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from kernels.lookup.bag_parts import BagParts, Rows, rows_of

# Of a launch of bags, of up to eight rows a multiprocessor and of more: with no more, row by row is faster. 1,024 rows of 16
# bags of 8 take a quarter less so (H200, 2 to 32 GB cold).
FEW_COLD_READS, FEW_OF_MANY_ROWS = 5000, 3000
_SUM_BYTES = 12 << 10  # of a block's partial sums: with more, four blocks leave the L1 less than half
# That a multiprocessor reads, of a launch whose blocks run all at once: hardly a row is read again soon, and more of them can
# be on their way if the L1 keeps none. Of more, or of blocks that come later, it does find some.
_READ_BYTES = 3 << 20
_PART_WORDS = 1024  # of a context's ids that a block of its history holds, of up to eight contexts at once: 32 kB


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch covers its rows. All but `rows` are compile-time constants of embedding.cu.

    rows: of a block. unit_threads, total_threads: of a block, for x and for the first-order sums, in whole warps. group: lanes
    that sum a row's first-order terms. blocks: of a multiprocessor, that must fit beside one another. flight: rows of a bag's
    part that a thread has in flight. evict_first: whether the L1 lets go of table rows before others.
    """

    rows: int
    unit_threads: int
    total_threads: int
    group: int
    blocks: int
    flight: int = 8
    evict_first: bool = False


def tiling(rows: int, units: int, totals: int, processors: int, pinned: bool, pooled: bool) -> Tiling:
    """The tiling of a launch for `rows` rows of `units` output vectors and `totals` first-order terms each.

    pinned: ids and numbers are read from host memory. pooled: some units are of several ids, which take their time row by row.
    The constants are from sweeps on an H200: 26 and 39 fields of dim 16, 26 of dim 128; float32, float16 and int8 tables; Zipf
    ids; 16 to 65,536 rows; 40 to 240 tilings each.
    """
    share = -(-rows // processors)
    wide = units > 320
    if pinned:  # few wide reads cross the bus sooner than many narrow ones
        wanted = 8 if share < 8 or wide or pooled else 16
    else:
        most = 8 if wide else 16 if units > 112 else 32
        wanted = min(most, 4 << bisect_right((8, 16, 64) if pooled or wide else (16, 32, 64), share))
    grid = -(-rows // wanted)
    second = 128 if wanted <= 8 and grid > processors else 224  # threads up to which two lanes are better than one
    lanes = 1
    while 2 * lanes <= wanted and 2 * lanes * units <= (448 if pooled else 320 if pinned else second if lanes == 1 else 128):
        lanes *= 2
    total_threads = 64 if totals else 0

    def width(most: int) -> int:  # whole warps
        return -(-lanes * units // max(1, -(-units // most)) // 32) * 32

    def resident(unit_threads: int) -> int:  # blocks of a multiprocessor that leave a thread 64 registers
        return max(1, 1024 // (unit_threads + total_threads))

    # One thread a unit is best while all blocks run at once; narrower blocks leave less idle when some have to wait.
    unit_threads = width(640)
    if grid > processors * resident(unit_threads):
        unit_threads = width(320 if lanes > 1 else 224)
    blocks = 1 if grid <= processors else min(2, resident(unit_threads))
    return Tiling(wanted, unit_threads, total_threads, _lanes_of(totals), blocks)


def history_tiling(rows: int, t: Tiling, once: int, processors: int) -> Tiling:
    """`tiling` where so many units are written once a context. Of few rows blocks have more threads, so that a context takes
    fewer blocks: 64 rows of 32 contexts, a history of 200, take 23.5 us, and 34 with the threads that rows want (H200, bf16).
    """
    if -(-rows // processors) >= 4 or (rows < 8 and once <= 1024):
        return t
    return replace(t, unit_threads=max(t.unit_threads, 480 - t.total_threads), blocks=1)


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """What a block writes once a context: units [first, end) of those that are so written, and the 4-byte words of a context's
    ids in which theirs lie.
    """

    first: int
    end: int
    first_word: int
    end_word: int


@cache
def history_parts(ids: tuple[tuple[int, int], ...], threads: int) -> tuple[HistoryPart, ...]:
    """Parts of about as many units, at most as many as a block has threads, and of ids that lie near each other.

    ids: the first byte and the bytes of each unit's id, in their order.
    """
    parts: list[HistoryPart] = []
    most = -(-len(ids) // max(1, -(-len(ids) // threads)))
    for i, (at, width) in enumerate(ids):
        last, end = parts[-1] if parts else None, -(-(at + width) // 4)
        if last is None or i - last.first >= most or end - last.first_word > _PART_WORDS:
            parts.append(HistoryPart(i, i + 1, at // 4, end))
        else:
            parts[-1] = replace(last, end=i + 1, end_word=max(last.end_word, end))
    return tuple(parts)


def most_words(parts: Sequence[HistoryPart]) -> int:
    """The words of the part that reads most."""
    return max((p.end_word - p.first_word for p in parts), default=0)


def history_blocks(parts: int, rows: int, ahead: bool) -> int:
    """How many blocks write histories, of so many parts each, for `rows` rows. They learn from the batch's header how many
    contexts there are, one after the other, as it is one line. ahead: the first block tells them, in device memory.
    """
    most = 256 if ahead else 32
    return parts * max(1, min(rows, most // max(1, parts)))


def _lanes_of(totals: int) -> int:
    """Lanes that sum a row's first-order terms."""
    return next(g for g in (8, 16, 32) if totals <= 8 * g or g == 32)


def bag_tiling(
    rows: int, units: int, totals: int, bags: BagParts, processors: int, pinned: bool, tiers: bool = False
) -> Tiling:
    """The tiling of a launch whose bags are cut into parts.

    units: output vectors that are of no bag. The constants are from sweeps on an H200: MLPerf's bags, 64 and 128 columns,
    float16 and int8, and bags of 10, float32 too, of uniform and Zipf ids, 256 to 16,384 rows; 48 tilings, 9, and 27.
    """
    kind, share, total_threads = rows_of(rows, processors), -(-rows // processors), 64 if totals else 0
    parts, singles = len(bags.parts), len(bags.singles)
    if kind is Rows.ALONE and not tiers:  # all that a row reads at once: no thread comes back for a single
        threads = -(-min(704, max(units, (parts + singles) * bags.team)) // 32) * 32
        return Tiling(1, threads, total_threads, _lanes_of(totals), 1)
    wanted, most, blocks, flight, together = min(4, share), 320, 2, 8, False
    if tiers:
        wanted = 8 if share > 16 and not pinned else wanted
    elif kind is Rows.SOME:  # more warps, whose threads have fewer rows in flight
        wanted, most, flight, together = -(-share // 2), 512, 4, share > 4
    elif share > (16 if pinned else 8):
        most, blocks, flight = 256, 4, 4
        if not pinned:  # up to eight rows, of which a warp takes one part: the same table, and as many ids
            together = share <= 32
            wanted = -(-share // 4) if together else 8 if 8 * bags.sum_bytes <= _SUM_BYTES else 4
    evict_first = together and share * bags.read_bytes <= _READ_BYTES
    unit_threads = min(most, -(-max(units, (parts or singles) * bags.team * wanted) // 32) * 32)
    if unit_threads == most or (flight == 4 and unit_threads + total_threads > most):  # the blocks' registers
        unit_threads = most - total_threads
    return Tiling(wanted, unit_threads, total_threads, _lanes_of(totals), blocks, flight, evict_first)


def far_tiling(rows: int, t: Tiling, team: int, parts: int, processors: int, cold_reads: float = math.inf) -> Tiling:
    """`bag_tiling` where rows are read over much of the host's memory. Threads take part after part, or single after single, of
    all rows of a block; so with few threads all blocks read the same one or two tables at a time. The fewer addresses are in
    use at once, the more of their translations are held near the GPU: 4,096 rows of 16 bags of 8, a quarter of the reads cold
    and spread over 1.5 GB, took 1,581 us and take 552 (H200, 13 tilings).

    team: threads that take a part. parts: of a row; 0: there are singles alone, of which a team takes eight rows. cold_reads:
    of a row; few of a launch do not pay for few threads, which have fewer rows in flight (`FEW_COLD_READS`).
    """
    many = rows > 8 * processors
    few_cold = parts and rows * cold_reads <= (FEW_OF_MANY_ROWS if many else FEW_COLD_READS)
    if rows < 4 * processors or few_cold:  # few rows wait for the first read
        return t
    wanted = 16 if not parts else 8 if many else 4
    threads = 2 * team * wanted if parts else 16 * team
    return replace(t, rows=wanted, unit_threads=min(320, max(64, -(-threads // 32) * 32)))
