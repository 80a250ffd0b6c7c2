"""Raw rows of a file as columns for the encoder, expected scores, and rows drawn at random where there is no file."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from dpiframe_core.errors import InputError, listed, shown
from dpiframe_core.schema import Categorical, FeatureSchema, Identity, Numeric, Vocabulary
from dpiframe_core.vocabulary import VocabularyTable, id_bound, vocabulary_name

Columns = dict[str, list[object]]


def read_rows(path: Path, schema: FeatureSchema, label: str | None) -> tuple[Columns, npt.NDArray[np.int64] | None]:
    """The features' columns of a CSV (header, empty = missing) or Parquet file, and the labels if it has such a column
    of zeros and ones.

    Raises:
        InputError: the file cannot be read, or lacks a feature; with the names.
    """
    types = {f.name: _arrow_type(f) for f in schema.features} | ({label: pa.float64()} if label else {})
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            convert = pcsv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
            table = pcsv.read_csv(path, convert_options=convert)
    except (pa.ArrowException, OSError) as e:
        raise InputError(str(path), shown(str(e)), "a CSV or Parquet file whose columns hold the features' types") from None
    missing = [f.name for f in schema.features if f.name not in table.column_names]
    if missing:
        raise InputError(str(path), f"{len(missing)} columns missing", f"one for each of {listed(missing)}")
    if not table.num_rows:
        raise InputError(str(path), "no rows", "at least one")
    labels = None
    if label is not None and label in table.column_names and set(table[label].unique().to_pylist()) <= {0, 1}:
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
        raise InputError(str(path), shown(str(e)), "a CSV file of probabilities") from None
    if len(scores) != rows:
        raise InputError(str(path), f"{len(scores)} rows", f"{rows}, as many as the raw rows")
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        raise InputError(str(path), "values outside 0 to 1", "probabilities")
    return scores


def random_rows(schema: FeatureSchema, vocabularies: Mapping[str, VocabularyTable], rows: int, seed: int = 7) -> Columns:
    """Raw values that the encoders know, some missing and some unknown."""
    rng = np.random.default_rng(seed)
    out: Columns = {}
    for f in schema.features:
        if isinstance(f, Numeric):
            values: list[object] = [round(float(v), 4) for v in rng.standard_normal(rows)]
        else:
            known = _known(schema, f, vocabularies)
            values = [_one(f, known, rng) for _ in range(rows)]
        for i in np.flatnonzero(rng.random(rows) < 0.05):
            values[i] = None
        out[f.name] = values
    return out


def _known(schema: FeatureSchema, f: Categorical, vocabularies: Mapping[str, VocabularyTable]) -> list[object]:
    match f.encoder:
        case Vocabulary():
            known: list[object] = vocabularies[vocabulary_name(f) or ""].table["value"].slice(0, 10_000).to_pylist()
            return known + (["unknown value"] if f.values == "string" else [])
        case Identity():
            return list(range(min(id_bound(schema, f), 10_000)))
        case _:
            return [f"value {i}" if f.values == "string" else i for i in range(100)]


def _one(f: Categorical, known: list[object], rng: np.random.Generator) -> object:
    if f.max_values == 1:
        return known[rng.integers(len(known))]
    return [known[i] for i in rng.integers(0, len(known), rng.integers(0, f.max_values + 1))]


def _arrow_type(f: Categorical | Numeric) -> pa.DataType:
    if isinstance(f, Numeric):
        return pa.float64()
    return pa.string() if f.values == "string" or f.max_values > 1 else pa.int64()
