"""Tensors as the Open Inference Protocol carries them, read as whole columns: numbers as views of the body, text with as little
work per value as Python allows. Owns byte counts, shapes and UTF-8; knows no features and no HTTP.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from math import prod
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.scoring.faults import Words
from dpiframe_core.errors import InputError
from dpiframe_core.features.raw_columns import Place, read_integers, read_numbers
from kernels.runtime import c_build

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
}  # fmt: skip
_LENGTH = Struct("<I")


class Tensor(NamedTuple):
    """One named input. Filled by `request`; its byte or value count fits its shape, but for text.

    Attributes:
        datatype: a key of `DTYPES`, or "BYTES".
        data: the raw bytes, or a flat list of JSON values.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | list[Any]

    @property
    def where(self) -> str:
        return f"inputs.{self.name}"


def check_size(tensor: Tensor) -> None:
    """Raises InputError if the tensor has another number of values than its shape, or bytes than its values."""
    count = prod(tensor.shape)
    if isinstance(tensor.data, list):
        if len(tensor.data) != count:
            raise InputError(f"{tensor.where}.data", len(tensor.data), f"{count} values, as shape {list(tensor.shape)} says")
    elif tensor.datatype != "BYTES":
        size = count * DTYPES[tensor.datatype].itemsize
        if len(tensor.data) != size:
            rule = f"{size} bytes, as {tensor.datatype} {list(tensor.shape)} has"
            raise InputError(tensor.where, len(tensor.data), rule)


def numbers_of(tensor: Tensor) -> npt.NDArray[Any]:
    """The values of any tensor but a text one, in its shape: a view of the body, read-only, or of a list's values."""
    dtype = DTYPES[tensor.datatype]
    flat: npt.NDArray[Any]
    if not isinstance(tensor.data, list):
        return np.ndarray(tensor.shape, dtype, tensor.data)
    if dtype.kind == "b":
        flat = np.array(_checked(tensor, bool, "true or false"), np.bool_)
    else:
        place = Place(f"{tensor.where}.data", True)
        wide, missing = (read_numbers if dtype.kind == "f" else read_integers)(tensor.data, place)
        if missing is not None:
            raise InputError(place.value(int(np.argmax(missing))), None, "a value: ids and masks cannot be missing")
        with np.errstate(over="ignore"):  # what overflows is refused as infinite, where the value is used
            flat = wide.astype(dtype)
        if dtype.kind != "f" and (flat != wide).any():
            i = int(np.argmax(flat != wide))
            raise InputError(place.value(i), int(wide[i]), f"an integer that {tensor.datatype} can hold")
    return flat.reshape(tensor.shape)


def texts_of(tensors: Sequence[Tensor]) -> list[list[str]]:
    """The texts of BYTES tensors, each a flat list.

    In binary form each value is a little-endian uint32 of its length, then so many bytes of UTF-8.

    Raises:
        InputError: a length runs beyond its tensor, there are bytes left over, or a value is not UTF-8.
    """
    functions = c_build.request_extension()
    if functions is not None:
        read = []
        for t in tensors:
            texts = t.data if isinstance(t.data, list) else functions.texts(t.data, prod(t.shape))
            if texts is None:  # it is said below what is wrong
                break
            read.append(texts)
        else:
            return read
    out: list[list[str]] = [t.data if isinstance(t.data, list) else [] for t in tensors]
    raw = [(i, bytes(t.data), prod(t.shape)) for i, t in enumerate(tensors) if not isinstance(t.data, list)]
    if not raw:
        return out
    joined = b"".join(data for _, data, _ in raw)
    counts = [count for *_, count in raw]
    found = _prefixes(joined, [len(data) for _, data, _ in raw], counts)
    if found is None:
        for i, data, count in raw:
            starts, ends = _prefixes_one_by_one(data, count, tensors[i].where)
            out[i] = _sliced(data, starts, ends, tensors[i].where)
        return out
    starts, ends = found
    bounds = list(accumulate(counts, initial=0))
    try:
        texts = _sliced(joined, starts, ends, "")
    except InputError:  # whose place counts over all tensors
        for (i, _, _), first, last in zip(raw, bounds, bounds[1:], strict=False):
            _sliced(joined, starts[first:last], ends[first:last], tensors[i].where)
        raise
    for (i, _, _), first, last in zip(raw, bounds, bounds[1:], strict=False):
        out[i] = texts[first:last]
    return out


def flattened(data: list[Any], dimensions: int) -> list[Any]:
    """JSON values in row-major order, given flat or nested as deep as the tensor has dimensions."""
    for _ in range(dimensions - 1):
        if set(map(type, data)) != {list}:
            break
        data = list(chain.from_iterable(data))
    return data


def _checked(tensor: Tensor, kind: type, rule: str) -> list[Any]:
    assert isinstance(tensor.data, list)
    for i, value in enumerate(tensor.data):
        if type(value) is not kind:
            raise InputError(f"{tensor.where}.data[{i}]", value, rule)
    return tensor.data


def _prefixes(joined: bytes, sizes: list[int], counts: list[int]) -> tuple[list[int], list[int]] | None:
    """Where each value's bytes start and end, found at once; None if they cannot be found this way.

    The length of a text below 256 bytes is a byte followed by three zeros, which ordinary text has nowhere else. If the places
    that look like this form a chain from the first byte to the last, each ending where the next begins, they are the lengths:
    the chain from the first byte is unique.
    """
    data = np.frombuffer(joined, np.uint8)
    total = sum(counts)
    if data.size < 4 or not total:
        return None
    zero = data == 0
    at = np.flatnonzero(zero[1:-2] & zero[2:-1] & zero[3:])
    if at.size != total:
        return None
    starts = at + 4
    ends = starts + data[at]
    if at[0] != 0 or ends[-1] != data.size or not np.array_equal(ends[:-1], at[1:]):
        return None
    # No text may be the last of one tensor and the first of the next: each tensor's first length stands at its first byte.
    firsts = np.cumsum([0, *counts[:-1]])
    if firsts[-1] >= total or not np.array_equal(at[firsts], np.cumsum([0, *sizes[:-1]])):
        return None
    return starts.tolist(), ends.tolist()


def _prefixes_one_by_one(data: bytes, count: int, where: str) -> tuple[list[int], list[int]]:
    starts, ends, at, size = [], [], 0, len(data)
    unpack = _LENGTH.unpack_from
    for i in range(count):
        end = at + 4 + unpack(data, at)[0] if at + 4 <= size else size + 1
        if end > size:
            raise InputError(f"{where}[{i}]", Words(f"{size - at} bytes left"), "its length in 4 bytes, and so many bytes")
        starts.append(at + 4)
        ends.append(end)
        at = end
    if at != size:
        raise InputError(where, size, f"{at} bytes, which its {count} values take")
    return starts, ends


def _sliced(data: bytes, starts: list[int], ends: list[int], where: str) -> list[str]:
    if data.isascii():
        text = data.decode("ascii")
        return [text[start:end] for start, end in zip(starts, ends, strict=True)]
    try:
        return [str(data[start:end], "utf-8") for start, end in zip(starts, ends, strict=True)]
    except UnicodeDecodeError:
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            try:
                data[start:end].decode()
            except UnicodeDecodeError:
                raise InputError(f"{where}[{i}]", data[start:end], "text in UTF-8") from None
        raise
