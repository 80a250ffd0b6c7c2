"""JSON objects of tokens and ids, read in pieces into a mapped temporary file: a dict of them takes ten times the memory.

Reads what libraries write, and leaves the rest (text that is no JSON, a token given twice, other values) to who can say it.
"""

import json
import re
import sys
from collections.abc import Collection
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pyarrow as pa

from dpiframe_core.errors import BundleError
from dpiframe_core.features.vocabulary import VocabularyTable

_PIECE = 1 << 16
_GAP, _TEXT = rb"[ \t\n\r]*+", rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_ENTRY = _GAP + _TEXT + _GAP + b":" + _GAP + b"[0-9]++" + _GAP
_ENTRIES = re.compile(b"(?:" + _ENTRY + b",)*+", re.DOTALL)
_LAST = re.compile(_ENTRY + b"}", re.DOTALL)
_OPEN, _NEXT, _END = re.compile(_GAP + b"{"), re.compile(_GAP + b"([,}])"), re.compile(_GAP + rb"\Z")
_NAMED = re.compile(_GAP + b"(" + _TEXT + b")" + _GAP + b":" + _GAP + b"{", re.DOTALL)
_SCHEMA = pa.schema({"value": pa.string(), "id": pa.int64()})


def read_token_ids(path: Path, names: Collection[str] | None) -> dict[str, VocabularyTable] | None:
    """Of an object of objects those that are named; without names, the file's only object, as "".

    None where `json.loads` may find a fault or something else, and where there is no room for the temporary file.
    """
    places: dict[str, tuple[int, int]] = {}
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data, TemporaryFile() as kept:
            at, more = _after(_OPEN, data, 0).end(), True
            while more:
                name, more = "", names is not None
                if more:
                    named = _after(_NAMED, data, at)
                    name, at = json.loads(named[1]), named.end()
                start, at = kept.tell(), _copied(data, at, kept)
                if name in places:
                    return None
                places[name] = start, kept.tell()
                if more:
                    after = _after(_NEXT, data, at)
                    at, more = after.end(), after[1] == b","
            _after(_END, data, at)
            kept.flush()
            whole = pa.py_buffer(mmap(kept.fileno(), 0, access=ACCESS_READ))
        wanted = {name: whole[start:end] for name, (start, end) in places.items() if names is None or name in names}
        return {name: VocabularyTable(pa.ipc.open_stream(part).read_all()) for name, part in wanted.items()}
    except (ValueError, OverflowError, OSError, BundleError):
        return None


def _copied(data: mmap, at: int, kept: IO[bytes]) -> int:
    """Where the object ends whose entries begin at `at`; they are put into `kept`."""
    with pa.ipc.new_stream(kept, _SCHEMA) as out:
        while True:
            end = _after(_ENTRIES, data, at, at + _PIECE).end()
            last = _LAST.match(data, end)
            stop = end if last is None else last.end()
            # A token that is longer than a piece leaves none to unpack.
            tokens, ids = zip(*json.loads(b"{%b}" % data[at : stop - 1], object_pairs_hook=list), strict=True)
            out.write_batch(pa.record_batch([pa.array(tokens, pa.string()), pa.array(ids, pa.int64())], schema=_SCHEMA))
            if last is not None:
                return stop
            at = stop


def _after(pattern: re.Pattern[bytes], data: mmap, at: int, end: int = sys.maxsize) -> re.Match[bytes]:
    found = pattern.match(data, at, end)
    if found is None:
        raise ValueError(f"{at}: no {pattern.pattern!r}")
    return found
