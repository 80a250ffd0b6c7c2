"""Where a target attention finds its columns, and what its kernels have to know of them when they are compiled."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionColumns:
    """Where a row's parts lie. Each of `dims` is a part of the query and of the keys, whose sum is the keys' dim.

    length: of the sequence. queries, keys, pooled: the first column of each part's dims[i] in x, of its length * dims[i] in x,
    and of its interest in out. mask: the first of `length` columns of x, 1 or 0; -1: none. kept: (x column, out column, count).
    """

    length: int
    dims: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    pooled: tuple[int, ...]
    mask: int
    kept: tuple[tuple[int, int, int], ...]

    @property
    def dim(self) -> int:
        return sum(self.dims)

    @property
    def width(self) -> int:
        """Columns of x that are read."""
        own = [k + self.length * d for k, d in zip(self.keys, self.dims, strict=True)]
        own += [q + d for q, d in zip(self.queries, self.dims, strict=True)] + [at + n for at, _, n in self.kept]
        return max(*own, self.mask + self.length if self.mask >= 0 else 0)

    @property
    def out_width(self) -> int:
        return max(*(p + d for p, d in zip(self.pooled, self.dims, strict=True)), *(to + n for _, to, n in self.kept), 0)

    @property
    def constants(self) -> dict[str, str]:
        """As the .cu files name them."""
        return {
            "LENGTH": str(self.length), "DIMS": listed(self.dims), "DIM": str(self.dim), "QUERIES": listed(self.queries),
            "KEYS": listed(self.keys), "POOLED": listed(self.pooled), "PARTS": str(len(self.dims)), "MASK": str(self.mask),
            "KEPT": ",".join(f"{{{listed(k)}}}" for k in self.kept) or "{0,0,0}",
        }  # fmt: skip


def listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
