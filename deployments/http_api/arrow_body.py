"""A request as one Arrow IPC stream: its rows are the candidates, and the schema's metadata holds all else, as JSON.

Owns that a stream is no larger than it looks. Knows no models; the encoder reads the columns as they are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct, error
from typing import Any

import pyarrow as pa

from deployments.scoring.faults import Words
from dpiframe_core.errors import InputError, TooLarge, shown
from dpiframe_core.features.arrow_columns import columns_of_batch

METADATA_KEY = b"request"
_U16, _I32, _U32 = Struct("<H"), Struct("<i"), Struct("<I")
_MESSAGE_HEADER, _COMPRESSION = 2, 3  # field numbers in Arrow's Message.fbs
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_PLAIN = frozenset((*_INTEGERS, pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string()))
# Nulls are as many as the batch has rows, which are bounded; inside a list they would not be.
_IDS = frozenset(kind.id for kind in (*_PLAIN, pa.null()))
_LISTS = (pa.types.is_list, pa.types.is_large_list)


class NotArrow(InputError):
    """The body is not an Arrow IPC stream."""

    status = 400
    code = "not_arrow"


@dataclass(frozen=True, slots=True, eq=False)
class ArrowRequest:
    """What a stream holds. `rest`: JSON of everything but the candidates, "{}" if it holds none."""

    rest: bytes
    candidates: Mapping[str, pa.Array]


def read_stream(body: bytes, max_rows: int) -> ArrowRequest:
    """Reads a stream of any number of record batches.

    Compressed batches, dictionaries and views are refused: with them a small body becomes any amount of data. What is accepted
    holds no more than its bytes.

    Raises:
        NotArrow: it cannot be read.
        InputError: a column has another type, or comes twice.
        TooLarge: it has more rows.
    """
    try:
        batch = _batch(body, max_rows)
        names = batch.schema.names  # decodes them
    except (pa.ArrowException, OSError, ValueError, TypeError, error) as fault:
        raise NotArrow("body", Words(shown(str(fault))[1:-1]), "an Arrow IPC stream") from None
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InputError("candidates", twice[:64], "each column once")
    metadata = batch.schema.metadata or {}
    return ArrowRequest(metadata.get(METADATA_KEY, b"{}"), columns_of_batch(batch, names))


def _batch(body: bytes, max_rows: int) -> pa.RecordBatch:
    """All its batches as one."""
    messages = iter(pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))
    first = next(messages, None)
    if first is None or first.type != "schema":  # pyarrow reads one out of any message: of another it is a crash
        raise ValueError("no schema")
    schema = pa.ipc.read_schema(first)
    usual = {kind.id for kind in schema.types} <= _IDS
    for field in () if usual else schema:
        if not _is_plain(field.type):
            rule = "a plain column of integers, floats, booleans or text, or of lists of them"
            raise InputError(f"candidates.{field.name[:64]}", str(field.type)[:64], rule)
    rows, batches = 0, []
    for message in messages:
        if message.type != "record batch" or _compressed(message):
            raise InputError("body", Words(f"a compressed batch or a {message.type}"), "uncompressed record batches")
        batch = pa.ipc.read_record_batch(message, schema)
        rows += batch.num_rows
        if rows > max_rows:
            raise TooLarge("candidates", rows, f"at most {max_rows}")
        batch.validate(full=True)
        batches.append(batch)
    if len(batches) == 1:
        return batches[0]
    columns = [column.combine_chunks() for column in pa.Table.from_batches(batches, schema).columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _is_plain(kind: Any) -> bool:
    return kind.id in _IDS or (any(is_list(kind) for is_list in _LISTS) and kind.value_type in _PLAIN)


def _compressed(message: Any) -> bool:
    """Whether a record batch says so in its flatbuffer, which Arrow has verified, but tells nobody about."""
    data = message.metadata.to_pybytes()
    batch = _child(data, _U32.unpack_from(data)[0], _MESSAGE_HEADER)
    return batch is not None and _child(data, batch, _COMPRESSION) is not None


def _child(data: bytes, table: int, field: int) -> int | None:
    """Where the table in a field of a flatbuffer table starts, if it has one."""
    vtable = table - _I32.unpack_from(data, table)[0]
    entry = 4 + 2 * field
    if entry < _U16.unpack_from(data, vtable)[0] and (offset := _U16.unpack_from(data, vtable + entry)[0]):
        at: int = table + offset
        return at + int(_U32.unpack_from(data, at)[0])
    return None
