"""Whether values are distinct, told from 64 bits of each in little memory; and the pieces in which large columns are read."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels.runtime import c_build

PIECE = 1 << 16  # entries at a time
_AT_ONCE, _HALVINGS = 1 << 20, 3  # so many are looked at together, of more at most an eighth
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # products of near integers are far from each other: their high bits choose a share
_EMPTY = np.zeros(1, np.int64)


def may_repeat(parts: Callable[[], Iterable[pa.ChunkedArray]], size: int) -> bool:
    """Whether two of so many integers are equal, or the 64-bit hashes of two texts; of texts without C, True.

    Many are read several times, for a share of them at a time, so that little memory is taken.
    """
    halvings = min((size // _AT_ONCE).bit_length(), _HALVINGS)
    shares, share = 1 << halvings, size >> halvings
    room = share if shares == 1 else share + 8 * math.isqrt(share)  # a share that is larger yet says something of them
    ordered = np.frombuffer(pa.allocate_buffer(room * 8), np.uint64)  # Arrow's: malloc may keep what is freed
    found = 0
    for wanted in range(shares):
        at = 0
        for chunk in chain.from_iterable(part.chunks for part in parts()):
            for start in range(0, len(chunk), PIECE):
                values = _distinguished(chunk.slice(start, PIECE))
                if values is None:
                    return True
                if shares > 1:
                    values = values[(values * _SPREAD >> np.uint64(64 - halvings)) == wanted]
                if at + len(values) > room:
                    return True
                ordered[at : at + len(values)] = values
                at += len(values)
        found += at
        ordered[:at].sort()
        if any((part[1:] == part[:-1]).any() for part in overlapping(ordered[:at])):
            return True
    return found != size


def _distinguished(values: pa.Array) -> npt.NDArray[np.uint64] | None:
    """Integers as they are, texts as their hashes; None without C."""
    if values.type == pa.int64():
        integers: npt.NDArray[np.uint64] = values.to_numpy().view(np.uint64)
        return integers
    functions = c_build.request_extension()
    if functions is None:
        return None
    hashes = np.empty(len(values), np.uint64)
    functions.text_hashes(*bytes_of(values.cast(pa.large_string())), hashes)
    return hashes


def bytes_of(texts: pa.LargeStringArray) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """Their bytes, and where each begins and the last ends."""
    _, bounds, data = texts.buffers()
    offsets = np.frombuffer(bounds, np.int64)[texts.offset : texts.offset + len(texts) + 1] if len(texts) else _EMPTY
    return memoryview(data or b""), offsets


def overlapping(values: pa.ChunkedArray | npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Pieces that have one entry in common."""
    return (np.asarray(values[start : start + PIECE + 1]) for start in range(0, len(values), PIECE))
