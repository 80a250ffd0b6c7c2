"""RecBole's stacked tables, taken apart: those of all tokens are one, in the order of the fields, and those of numbers."""

from collections.abc import Mapping, Sequence

import pyarrow.compute as pc
import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.importers.mapped_rows import mapped_rows
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, SpecFile

Feature = SparseFeature | DenseFeature


def take_tables(
    out: dict[str, Tensor], where: str, file: SpecFile, features: Sequence[Feature], prefix: str = "", of: str = ""
) -> dict[str, Tensor]:
    """A table for each feature; the library's are taken out of `out`, of which `prefix` and `of` are parts of the names.

    Those of lists have one more row, of zeros, for unknown tokens.

    Raises:
        InputError: a table lacks, or has other rows than the vocabularies together.
    """
    tokens = {f.name: token_rows(file, f) for f in features if isinstance(f, SparseFeature) and f.max_values == 1}
    lists = {f.name: token_rows(file, f) for f in features if isinstance(f, SparseFeature) and f.max_values > 1}
    numbers = {f.name: 2 for f in features if isinstance(f, DenseFeature)}
    parts: dict[str, Tensor] = {}
    for i, (name, expected) in enumerate(lists.items()):
        rows = _split(out, f"{prefix}token_seq_embedding_table.{of}{i}.weight", {name: expected}, where, file.where)[name]
        parts[name] = mapped_rows([rows, torch.zeros_like(rows[:1])])
    parts |= _split(out, f"{prefix}token_embedding_table.{of}embedding.weight", tokens, where, file.where)
    of_numbers = _split(out, f"{prefix}float_embedding_table.{of}embedding.weight", numbers, where, file.where)
    return parts | {name: rows[1:].T.contiguous() for name, rows in of_numbers.items()}  # a number scales its second row


def _split(out: dict[str, Tensor], full: str, rows: Mapping[str, int], where: str, spec: str) -> dict[str, Tensor]:
    """Takes a stacked table apart, `rows` of each field."""
    if not rows:
        return {}
    table = _taken(out, full, where)
    if len(table) != sum(rows.values()):
        parts = " + ".join(f"{n} of {name}" for name, n in rows.items())
        raise InputError(f"{where}: {full}", f"{len(table)} rows", f"{sum(rows.values())}, {parts}, as {spec} says")
    return dict(zip(rows, torch.split(table, list(rows.values())), strict=True))


def _taken(out: dict[str, Tensor], name: str, where: str) -> Tensor:
    if name not in out:
        raise InputError(f"{where}: {name}", "no such parameter", "it, as RecBole's models of features have it")
    return out.pop(name)


def token_rows(file: SpecFile, f: SparseFeature) -> int:
    """Of a field: its tokens, and `[PAD]`."""
    if f.name not in file.vocabularies:
        raise InputError(
            f"{file.where}: {f.name}.vocabulary", "nothing", "a JSON file of tokens and ids, as RecBole's data set has"
        )
    return 1 + (pc.max(file.vocabularies[f.name].table["id"]).as_py() or 0)
