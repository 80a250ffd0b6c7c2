"""How a lookup's launch on a GPU is cut into blocks and threads: plain arithmetic, fitted to measurements. Knows no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch covers its rows. All but `rows` are compile-time constants of embedding.cu.

    rows: of a block. unit_threads, total_threads: of a block, for x and for the first-order sums, in whole warps.
    unroll: row loads that a thread has in flight. group: lanes that sum a row's first-order terms. blocks: of a multiprocessor,
    that must fit beside one another.
    """

    rows: int
    unit_threads: int
    total_threads: int
    unroll: int
    group: int
    blocks: int


def tiling(rows: int, units: int, totals: int, processors: int, pinned: bool) -> Tiling:
    """The tiling of a launch for `rows` rows of `units` output vectors and `totals` first-order terms each.

    `pinned`: ids and numbers are read from host memory. The constants are from sweeps on an H200: 39 fields of dim 16 or 128
    and 26 of dim 16 or 128; float32, float16 and int8 tables; Zipf and uniform ids; 1 to 65,536 rows; 10 to 300 tilings each.
    """
    share = -(-rows // processors)
    if not pinned:
        most, wanted = 320, min(32 if share >= 64 and units <= 160 else 16, share)
    elif share <= 8:  # the bus takes few wide reads sooner than many narrow ones
        most, wanted = 640, min(16, -(-rows // 8))
    elif share <= 64:  # ids come late: many small blocks a multiprocessor, so that some gather while others wait
        most, wanted = 160, 4
    else:
        most, wanted = 320, 16
    lanes = 1
    while 0 < 2 * lanes * units <= most and 2 * lanes <= wanted:
        lanes *= 2
    if pinned and share <= 8:
        wanted = min(wanted, 4 * lanes)
    wanted = -(-wanted // lanes) * lanes
    grid = -(-rows // wanted)
    unroll = 8 if wanted >= 16 * lanes else 4
    total_threads = 64 if totals else 0

    def width(most: int) -> int:
        return _warps(-(-lanes * units // max(1, -(-units // most))))

    def resident(unit_threads: int) -> int:  # blocks of a multiprocessor whose registers hold what is in flight
        return max(1, (1024 if unroll == 8 else 1536) // (unit_threads + total_threads))

    # One thread a unit is best while all blocks run at once; narrower blocks leave less idle when some have to wait.
    unit_threads = width(640)
    if grid > processors * resident(unit_threads):
        unit_threads = width(416)
    blocks = 1 if grid <= processors else min(3, resident(unit_threads))
    group = next(g for g in (8, 16, 32) if totals <= 8 * g or g == 32)
    return Tiling(wanted, unit_threads, total_threads, unroll, group, blocks)


def _warps(threads: int) -> int:
    return -(-threads // 32) * 32
