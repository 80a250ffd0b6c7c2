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
_VIEW_BYTES, _BUFFER_BYTES = 16, 64  # of a view; as long as it takes to look at one of the buffers that views may have
_LOOK_BYTES = 1 << 26  # columns of a body may all have the same bytes: beyond so many they are counted
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
    rows, columns and batches may have one long text or dictionary in common. `most_shared` are the bytes of these; they are
    counted for each before they are read.

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
    looked_through = range(len(schema)) if len(schema) * len(body) > _LOOK_BYTES else shared_by
    # A reader takes a third longer than a message alone; it knows dictionaries.
    alone = (pa.ipc.read_record_batch(message, schema) for message in of_rows)
    rows, shared, batches = 0, 0, []
    for batch in pa.ipc.open_stream(pa.py_buffer(body)) if shared_by else alone:
        rows += batch.num_rows
        if rows > max_rows:
            raise TooLarge("candidates", rows, f"at most {max_rows}")
        if looked_through:
            batch.validate()  # of sizes: none is read
            shared = _within(most_shared, shared + sum(_look_bytes(batch.column(i)) for i in looked_through))
        batch.validate(full=True)
        shared = _within(most_shared, shared + sum(_row_bytes(batch.column(i)) for i in shared_by))
        batches.append(batch)
    if len(batches) == 1:
        return batches[0]
    try:
        columns = [column.combine_chunks() for column in pa.Table.from_batches(batches, schema).columns]
    except pa.ArrowException as fault:  # their dictionaries are not alike
        raise InputError("candidates", Words(shown(str(fault))[1:-1]), "one record batch, or the same dictionaries") from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _within(most: int, shared: int) -> int:
    if shared > most:
        got = Words(f"{shared} bytes, counted for each row, column and batch that has them")
        raise TooLarge("candidates", got, f"at most {most}")
    return shared


def _is_plain(kind: Any) -> bool:
    if pa.types.is_dictionary(kind) or any(is_list(kind) for is_list in _LISTS):
        return kind.value_type in _VALUES
    return kind.id in _IDS or kind in _VALUES


def _is_shared(kind: Any) -> bool:
    """Whether many rows of a column may have one text."""
    return bool(pa.types.is_dictionary(kind) or pa.types.is_string_view(getattr(kind, "value_type", None) or kind))


def _look_bytes(column: pa.Array) -> int:
    """Bytes that are read of a column, of its whole dictionary or all values of its lists: others may have the same ones."""
    kind, values = column.type, column
    if pa.types.is_dictionary(kind):
        values = column.dictionary
    elif any(is_list(kind) for is_list in _LISTS):
        values = column.values
    if not pa.types.is_string_view(values.type):
        return int(values.nbytes) + (0 if values is column else 4 * len(column))
    return int(_sizes(values).sum(dtype=np.int64)) + _VIEW_BYTES * len(values) + _BUFFER_BYTES * len(values.buffers())


def _row_bytes(column: pa.Array) -> int:
    """Bytes of the texts of a column with a dictionary that is sound, each row's counted."""
    if not pa.types.is_dictionary(column.type):
        return 0
    return int(_sizes(column.dictionary)[column.indices.drop_null().to_numpy(zero_copy_only=False)].sum(dtype=np.int64))


def _sizes(values: pa.Array) -> npt.NDArray[np.int64 | np.int32]:
    """Bytes of each text; null and what is no text have none. Of views they are what these say."""
    if pa.types.is_string_view(values.type) and len(values):
        words = np.frombuffer(values.buffers()[1], np.int32, 4 * len(values))[::4]
        words = words * values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else words
        if words.min() < 0:
            raise ValueError("a text of fewer bytes than none")
        return words
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
