"""The raw rows of a file as a model's encoder gives them, for who counts ids rather than scores."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from deployments.offline.score_job import input_file
from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.files.row_files import Chunk, iter_chunks
from dpiframe_core.files.table_rows import TableEncoder

_CHUNK_ROWS = 8192


def encoded_rows(bundle: Bundle, path: Path, separators: Mapping[str, str]) -> Iterator[RowBlock]:
    """Some thousand rows at a time; each has its own context.

    Raises:
        InputError: as `input_file`, or a bad row, named by file, row and column.
    """
    schema = bundle.manifest.feature_schema
    file = replace(input_file(path, schema, separators)[0], columns=tuple(f.name for f in schema.features))
    encoder = TableEncoder(Encoder(schema, bundle.vocabularies))

    def encoded(chunk: Chunk) -> RowBlock:
        return encoder.encode(chunk.table, lambda name, row: file.place(name, chunk.first_row + row))

    return map(encoded, iter_chunks(file, _CHUNK_ROWS))
