"""A request as one Arrow IPC stream: its rows are the candidates, and the schema's metadata holds all else, as JSON.

Owns that a stream is no larger than it looks. Knows no models; the encoder reads the columns as they are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct, error
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deployments.scoring.faults import Words
from dpiframe_core.errors import InputError, TooLarge, shown
from dpiframe_core.features.arrow_columns import columns_of_batch

METADATA_KEY = b"request"
_U16, _I32, _U32 = Struct("<H"), Struct("<i"), Struct("<I")
_MESSAGE_HEADER, _DICTIONARYS_ROWS, _COMPRESSION = 2, 1, 3  # field numbers in Arrow's Message.fbs
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_PLAIN = frozenset((*_INTEGERS, pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string()))
# Nulls are as many as the batch has rows, which are bounded; inside a list they would not be.
_IDS = frozenset(kind.id for kind in (*_PLAIN, pa.null()))
_VALUES = _PLAIN | {pa.string_view()}  # a column of views is not in `_IDS`, as its texts are counted
_OF_ROWS = ("record batch", "dictionary")
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


def read_stream(body: bytes, max_rows: int, most_shared: int) -> ArrowRequest:
    """Reads a stream of any number of record batches.

    Compressed batches are refused: with them a small body becomes any amount of data. So it might with dictionaries and views:
    many rows, columns and batches may have one long text or dictionary. `most_shared` are the bytes of these, counted for each.

    Raises:
        NotArrow: it cannot be read.
        InputError: a column has another type, or comes twice.
        TooLarge: it has more rows, or shares more.
    """
    try:
        batch = _batch(body, max_rows, most_shared)
        names = batch.schema.names  # decodes them
    except (pa.ArrowException, OSError, ValueError, TypeError, error) as fault:
        raise NotArrow("body", Words(shown(str(fault))[1:-1]), "an Arrow IPC stream") from None
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InputError("candidates", twice[:64], "each column once")
    metadata = batch.schema.metadata or {}
    return ArrowRequest(metadata.get(METADATA_KEY, b"{}"), columns_of_batch(batch, names))


def _batch(body: bytes, max_rows: int, most_shared: int) -> pa.RecordBatch:
    """All its batches as one."""
    messages = iter(pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))
    first = next(messages, None)
    if first is None or first.type != "schema":  # pyarrow reads one out of any message: of another it is a crash
        raise ValueError("no schema")
    schema = pa.ipc.read_schema(first)
    usual = {kind.id for kind in schema.types} <= _IDS
    for field in () if usual else schema:
        if not _is_plain(field.type):
            rule = "a column of integers, floats, booleans or text, or of lists of them"
            raise InputError(f"candidates.{field.name[:64]}", str(field.type)[:64], rule)
    shared_by = [] if usual else [i for i, kind in enumerate(schema.types) if _is_shared(kind)]
    taken, of_rows = _OF_ROWS[: 2 if shared_by else 1], list(messages)
    for message in of_rows:
        if message.type not in taken or _compressed(message):
            got = Words("a compressed batch" if message.type in taken else f"a {message.type}")
            raise InputError("body", got, "uncompressed record batches")
    alone = (
        pa.ipc.read_record_batch(message, schema) for message in of_rows
    )  # sooner than by a reader, who knows dictionaries
    rows, shared, batches = 0, 0, []
    for batch in pa.ipc.open_stream(pa.py_buffer(body)) if shared_by else alone:
        rows += batch.num_rows
        if rows > max_rows:
            raise TooLarge("candidates", rows, f"at most {max_rows}")
        columns = [batch.column(i) for i in shared_by]
        shared = _within(most_shared, shared + sum(map(_dictionary_bytes, columns)))
        batch.validate(full=True)
        shared = _within(most_shared, shared + sum(map(_shared_text, columns)))
        batches.append(batch)
    if len(batches) == 1:
        return batches[0]
    columns = [column.combine_chunks() for column in pa.Table.from_batches(batches, schema).columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _within(most: int, shared: int) -> int:
    if shared > most:
        raise TooLarge("candidates", Words(f"{shared} bytes in views and dictionaries"), f"at most {most}, each row's counted")
    return shared


def _is_plain(kind: Any) -> bool:
    if pa.types.is_dictionary(kind) or any(is_list(kind) for is_list in _LISTS):
        return kind.value_type in _VALUES
    return kind.id in _IDS or kind in _VALUES


def _is_shared(kind: Any) -> bool:
    """Whether many rows of a column may have one text."""
    return bool(pa.types.is_dictionary(kind) or pa.types.is_string_view(getattr(kind, "value_type", None) or kind))


def _dictionary_bytes(column: pa.Array) -> int:
    """Of the dictionary of a column, which other columns and batches may have too: each looks through it."""
    return int(column.dictionary.get_total_buffer_size()) if pa.types.is_dictionary(column.type) else 0


def _shared_text(column: pa.Array) -> int:
    """Bytes of the texts of a column, sound by now, where many rows may have the same one: each counts it."""
    if pa.types.is_dictionary(column.type):
        sizes = _sizes(column.dictionary)[column.indices.drop_null().to_numpy(zero_copy_only=False)]
    else:
        sizes = _sizes(column if pa.types.is_string_view(column.type) else column.flatten())
    return int(sizes.sum(dtype=np.int64))


def _sizes(values: pa.Array) -> npt.NDArray[np.int64 | np.int32]:
    """Bytes of each text; null and what is no text have none."""
    if pa.types.is_string_view(values.type) and len(values):
        words = np.frombuffer(values.buffers()[1], np.int32, 4 * len(values), 16 * values.offset)[::4]
        return words * values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else words
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return pc.binary_length(values).fill_null(0).to_numpy()  # type: ignore[no-any-return]
    return np.zeros(len(values), np.int32)


def _compressed(message: Any) -> bool:
    """Whether a record batch, or a dictionary's, says so in its flatbuffer, which Arrow has verified and tells nobody of."""
    data = message.metadata.to_pybytes()
    batch = _child(data, _U32.unpack_from(data)[0], _MESSAGE_HEADER)
    if message.type == "dictionary" and batch is not None:
        batch = _child(data, batch, _DICTIONARYS_ROWS)
    return batch is not None and _child(data, batch, _COMPRESSION) is not None


def _child(data: bytes, table: int, field: int) -> int | None:
    """Where the table in a field of a flatbuffer table starts, if it has one."""
    vtable = table - _I32.unpack_from(data, table)[0]
    entry = 4 + 2 * field
    if entry < _U16.unpack_from(data, vtable)[0] and (offset := _U16.unpack_from(data, vtable + entry)[0]):
        at: int = table + offset
        return at + int(_U32.unpack_from(data, at)[0])
    return None
