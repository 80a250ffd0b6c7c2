"""The tiles in which a wave can be computed (wave.cu, wave_wgmma.cu). Plain data: sizes, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

STATIC_BYTES = 1024  # of shared memory, beside the ring, at most
FEW_ROWS = 16  # up to which it may pay to spread the weights over as many blocks as there can be
LEAST_SHARED_COLUMNS = 16  # of a tile that shares: `share_marks` counts those
MANY_ROWS = 1024  # from which on a library's own kernels may be worth while
MOST_HEAD_COLUMNS = 128  # of a tile whose rows are dotted with a head: 32 threads of 4 columns, which one warp adds up


@dataclass(frozen=True, slots=True)
class Tile:
    """Of wave.cu: rows and columns of a block's tile; warps along its rows, its columns and K; 128-byte pieces of K a buffer,
    and buffers; blocks that compute a tile together, each a part of K (a cluster, sm_90 on).
    """

    rows: int
    columns: int
    warps: tuple[int, int, int]
    span: int
    stages: int
    cluster: int = 1

    @property
    def name(self) -> str:
        warps, cluster = "x".join(map(str, self.warps)), f"-c{self.cluster}" if self.cluster > 1 else ""
        return f"mma-{self.rows}x{self.columns}-w{warps}-k{self.span}-s{self.stages}{cluster}"

    @property
    def threads(self) -> int:
        return 32 * self.row_warps

    @property
    def row_warps(self) -> int:
        """Rows that a block takes of a job that has a warp a row."""
        return self.warps[0] * self.warps[1] * self.warps[2]

    @property
    def shared_bytes(self) -> int:
        """The ring of buffers, in whose place the products of all warps are added up in the end."""
        products = 4 * self.warps[2] * self.rows * (self.columns + 8)
        return max(self.stages * self.span * (self.rows + self.columns) * 128, products)

    @property
    def constants(self) -> dict[str, str]:
        along_rows, along_columns, along_k = map(str, self.warps)
        sizes = {"BM": str(self.rows), "BN": str(self.columns), "SPAN": str(self.span), "STAGES": str(self.stages)}
        return sizes | {"WM": along_rows, "WN": along_columns, "WK": along_k, "CLUSTERED": str(int(self.cluster > 1))}


@dataclass(frozen=True, slots=True)
class WideTile:
    """Of wave_wgmma.cu (sm_90a): rows and columns of a block's tile; warpgroups along K, for each 64 rows; and 128-byte buffers
    of K, a multiple of these. passes: 3 for float32 as exact as its own arithmetic, in whose buffers two tf32 halves of the
    weights lie. brings: x0 and xl of cross layers to the L2, ahead of their use. cluster: as of `Tile`.
    """

    rows: int
    columns: int
    along_k: int
    stages: int
    passes: int = 1
    brings: bool = False
    cluster: int = 1

    @property
    def name(self) -> str:
        kind, end = f"wgmma{self.passes if self.passes > 1 else ''}", "-p" if self.brings else ""
        end += f"-c{self.cluster}" if self.cluster > 1 else ""
        return f"{kind}-{self.rows}x{self.columns}-w{self.along_k}-s{self.stages}{end}"

    @property
    def threads(self) -> int:
        return self.rows * 2 * self.along_k + 32

    @property
    def row_warps(self) -> int:
        return self.rows // 16 * self.along_k

    @property
    def shared_bytes(self) -> int:
        products = 4 * self.along_k * self.rows * (self.columns + 8)
        halves = 2 if self.passes == 3 else 1
        before = 2048 if self.cluster > 1 else 1024  # to align the ring; barriers
        return max(self.stages * (self.rows + halves * self.columns) * 128, products) + before

    @property
    def constants(self) -> dict[str, str]:
        sizes = {"BM": str(self.rows), "BN": str(self.columns), "STAGES": str(self.stages)}
        sizes |= {"CLUSTERED": str(int(self.cluster > 1))}
        return sizes | {"WK": str(self.along_k), "PASSES": str(self.passes), "BRINGS": str(int(self.brings))}


@dataclass(frozen=True, slots=True)
class CrossedTile:
    """Of crossed_wgmma.cu (sm_90a), for a cross layer alone in its wave: rows and columns of a block's tile, its buffers."""

    rows: int
    columns: int
    stages: int

    @property
    def name(self) -> str:
        return f"crossed-{self.rows}x{self.columns}-s{self.stages}"

    @property
    def threads(self) -> int:
        return self.rows * 2 + 32

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.rows + self.columns) * 128 + 1024  # to align the ring

    @property
    def constants(self) -> dict[str, str]:
        return {"BM": str(self.rows), "BN": str(self.columns), "STAGES": str(self.stages)}

    def holds(self, size: int) -> bool:
        """Whether the ring holds a tile's x0 and xl, of values of so many bytes, at once and in whole lines of 128 bytes."""
        boxes, in_buffer = 2 * self.columns * size // 128, (self.rows + self.columns) // self.rows
        return self.columns * size % 128 == 0 and -(-boxes // in_buffer) <= self.stages


TILES = (
    Tile(16, 8, (1, 1, 8), 8, 6),
    Tile(16, 16, (1, 1, 8), 4, 5),
    Tile(16, 16, (1, 1, 8), 8, 5),
    Tile(16, 16, (1, 1, 16), 8, 5),
    Tile(16, 32, (1, 1, 8), 4, 4),
    Tile(16, 32, (1, 1, 8), 4, 9),
    Tile(16, 32, (1, 1, 4), 4, 4),
    Tile(32, 16, (1, 1, 8), 4, 6),
    Tile(32, 32, (1, 1, 8), 4, 3),
    Tile(32, 32, (1, 1, 8), 4, 6),
    Tile(32, 32, (1, 1, 4), 2, 6),
    Tile(32, 64, (1, 2, 4), 2, 4),
    Tile(32, 64, (1, 2, 4), 2, 6),
    Tile(32, 128, (1, 4, 2), 2, 3),
    Tile(64, 64, (2, 2, 2), 2, 3),
    Tile(64, 64, (2, 2, 1), 1, 4),
    Tile(64, 128, (2, 4, 1), 1, 4),
    Tile(128, 128, (2, 4, 1), 1, 3),
)
WIDE_TILES = (
    WideTile(64, 64, 1, 6),
    WideTile(64, 64, 2, 12),
    WideTile(64, 128, 1, 4),
    WideTile(64, 128, 1, 8),
    WideTile(128, 64, 1, 4),
    WideTile(128, 64, 1, 8),
    WideTile(128, 128, 1, 3),
    WideTile(128, 128, 1, 6),
    WideTile(128, 256, 1, 4),
)
# Beside these where there are cross layers.
CROSSED_TILES = (WideTile(128, 128, 1, 3, brings=True), WideTile(128, 256, 1, 4, brings=True))
# And these for one alone.
LONE_TILES = (CrossedTile(128, 64, 4), CrossedTile(128, 128, 3), CrossedTile(128, 128, 6))
EXACT_TILES = (WideTile(64, 64, 1, 4, 3), WideTile(64, 64, 2, 4, 3), WideTile(64, 128, 2, 4, 3), WideTile(128, 128, 1, 4, 3))

# And for few tiles of a deep K these, each by a cluster.
CLUSTERED_TILES: tuple[Tile | WideTile, ...] = (*(TILES[i] for i in (1, 3, 9, 14)), *(WIDE_TILES[i] for i in (1, 3, 7)))
CLUSTERS = (2, 4, 8)
LEAST_CHUNKS = 12  # of a block of a cluster: to meet takes a microsecond


AnyTile = Tile | WideTile | CrossedTile


def tiles_for(rows: int, wide: Sequence[WideTile | CrossedTile] = ()) -> list[AnyTile]:
    """The tiles worth trying for a number of rows: none that is mostly padding, none far too small. `wide`: those that the GPU
    and the precision allow."""
    tiles: list[AnyTile] = [t for t in TILES if t.rows <= max(16, 2 * rows) and t.rows * 32 >= min(rows, 2048)]
    tiles = [t for t in tiles if t.columns >= LEAST_SHARED_COLUMNS or rows <= FEW_ROWS]
    return tiles + [t for t in wide if rows >= 64 and t.rows <= rows]


def clustered(tiles: Sequence[AnyTile], rows: int, layers: Sequence[tuple[int, int]], processors: int) -> list[AnyTile]:
    """Those of the tiles that clusters are worth trying for, where tiles alone leave multiprocessors idle. layers: columns, and
    chunks of K, of each layer of the wave."""
    found: list[AnyTile] = []
    for tile in [t for t in CLUSTERED_TILES if t in tiles]:
        blocks = -(-rows // tile.rows) * sum(-(-width // tile.columns) for width, _ in layers)
        most = min(2 * processors // max(blocks, 1) if blocks < processors else 0, max(c for _, c in layers) // LEAST_CHUNKS)
        found += [replace(tile, cluster=c) for c in CLUSTERS if c <= most]
    return found
