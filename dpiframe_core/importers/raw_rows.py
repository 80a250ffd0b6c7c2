"""Raw rows of a file as columns for the encoder, expected scores, and rows drawn at random where there is no file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from dpiframe_core.errors import InputError, listed
from dpiframe_core.features.raw_columns import split_text
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema, Identity, Numeric, Vocabulary
from dpiframe_core.features.vocabulary import VocabularyTable, id_bound, vocabulary_name
from dpiframe_core.files.row_files import RowFile, column_names, iter_chunks
from dpiframe_core.files.table_rows import column_types, missing_features, splitters

Columns = dict[str, list[object]]
_CHUNK_ROWS = 1 << 16


def read_rows(path: Path, schema: FeatureSchema, label: str | None) -> tuple[Columns, npt.NDArray[np.int64] | None]:
    """The features' columns of a file of rows, as `row_files` reads it with the schema's splitters, and the labels if it has
    such a column of zeros and ones.

    Raises:
        InputError: the file cannot be read, or lacks a feature; with the names.
    """
    types = column_types(schema) | ({label: pa.float64()} if label else {})
    file = RowFile(path, types, splitters(schema))
    found = column_names(file)
    if missing := missing_features(schema, found):
        raise InputError(str(path), f"{len(missing)} columns missing", f"one for each of {listed(missing)}")
    joined = [f.name for f in schema.features if f.max_values > 1 and f.name not in file.separators]
    if joined and path.suffix.lower() in (".csv", ".tsv"):
        raise InputError(
            f"{path}: {joined[0]}", "text", "lists, of Parquet or JSON lines, as the schema has no splitter for it"
        )
    wanted = tuple(name for name in found if name in types)
    table = pa.concat_tables([chunk.table for chunk in iter_chunks(replace(file, columns=wanted), _CHUNK_ROWS)])
    labels = None
    if label is not None and label in found and set(table[label].unique().to_pylist()) <= {0, 1}:
        labels = table[label].to_numpy().astype(np.int64)
    return {f.name: table[f.name].to_pylist() for f in schema.features}, labels


def read_expected(path: Path, rows: int) -> npt.NDArray[np.float64]:
    """float64[rows] probabilities: the column `score` of a CSV file, or its only one.

    Raises:
        InputError: the file cannot be read, or holds another number of rows or something else than probabilities.
    """
    try:
        table = pcsv.read_csv(path)
        name = "score" if "score" in table.column_names else table.column_names[0]
        if table.num_columns > 1 and name != "score":
            raise InputError(str(path), table.column_names, "a column `score`")
        scores: npt.NDArray[np.float64] = table[name].cast(pa.float64()).to_numpy()
    except (pa.ArrowException, OSError) as e:
        raise InputError(str(path), str(e), "a CSV file of probabilities") from None
    if len(scores) != rows:
        raise InputError(str(path), f"{len(scores)} rows", f"{rows}, as many as the raw rows")
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        raise InputError(str(path), "values outside 0 to 1", "probabilities")
    return scores


def entries_named(
    schema: FeatureSchema, vocabularies: Mapping[str, VocabularyTable], columns: Columns
) -> dict[str, VocabularyTable]:
    """The vocabularies with the entries that the columns name alone: lookups in large ones take memory as tables do."""
    named: dict[str, set[object]] = {name: set() for name in vocabularies}
    for f in schema.features:
        if isinstance(f, Categorical) and (name := vocabulary_name(f)) is not None:
            for value in columns[f.name]:
                parts = value if f.splitter is None else split_text(value, f.splitter, f.values)
                named[name].update(parts if isinstance(parts, list) else [parts])
    out = {}
    for name, vocabulary in vocabularies.items():
        values = vocabulary.table["value"]
        kind = str if vocabulary.values == "string" else int
        known = pa.array([v for v in named[name] if type(v) is kind], values.type)
        out[name] = VocabularyTable(vocabulary.table.filter(pc.is_in(values, known)))
    return out


def random_rows(schema: FeatureSchema, vocabularies: Mapping[str, VocabularyTable], rows: int, seed: int = 7) -> Columns:
    """Raw values that the encoders know; some missing and some unknown, where the schema says what these mean."""
    rng = np.random.default_rng(seed)
    out: Columns = {}
    for f in schema.features:
        if isinstance(f, Numeric):
            values: list[object] = [round(float(v), 4) for v in rng.standard_normal(rows)]
        else:
            known = _known(schema, f, vocabularies)
            values = [_one(f, known, rng) for _ in range(rows)]
        if _takes_null(f):
            for i in np.flatnonzero(rng.random(rows) < 0.05):
                values[i] = None
        out[f.name] = values
    return out


def _takes_null(f: Feature) -> bool:
    return (f.missing_value if isinstance(f, Numeric) and f.buckets is None else f.missing_id) is not None


def _known(schema: FeatureSchema, f: Categorical, vocabularies: Mapping[str, VocabularyTable]) -> list[object]:
    match f.encoder:
        case Vocabulary():
            known: list[object] = vocabularies[vocabulary_name(f) or ""].table["value"].slice(0, 10_000).to_pylist()
            return known + (["unknown value"] if f.values == "string" and f.oov_id is not None else [])
        case Identity():
            return list(range(min(id_bound(schema, f), 10_000)))
        case _:
            return [f"value {i}" if f.values == "string" else i for i in range(100)]


def _one(f: Categorical, known: list[object], rng: np.random.Generator) -> object:
    if f.max_values == 1:
        return known[rng.integers(len(known))]
    return [known[i] for i in rng.integers(0, len(known), rng.integers(0 if _takes_null(f) else 1, f.max_values + 1))]
