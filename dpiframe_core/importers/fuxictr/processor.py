"""What a run's feature processor holds beside its files: vocabularies to check those against, and numeric normalisers."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpiframe_core.errors import InputError, listed, shown
from dpiframe_core.features.transforms import MinMax, Standardize
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.importers.fuxictr.pickled_processor import (
    BoundTransform,
    MinMaxScalerRecord,
    NormalizerRecord,
    Processor,
    StandardScalerRecord,
    TokenizerRecord,
    Tokens,
    tokens_of,
)

_PART = 1 << 12


def as_mapping(where: str, value: object) -> Mapping[str, Any]:
    """The value, if it is a mapping; else InputError."""
    if not isinstance(value, Mapping):
        raise InputError(where, value, "a mapping of names")
    return value


def check_tokenizers(processor: Processor, where: str, vocab_name: str, vocabularies: Mapping[str, VocabularyTable]) -> None:
    """Raises InputError where the processor's vocabularies are others than those of the file `vocab_name`."""
    made = as_mapping(where, processor.fields.get("processor_dict"))
    wrong = []
    for name, tokens in vocabularies.items():
        tokenizer = made.get(f"{name}::tokenizer")
        found = tokenizer.fields.get("vocab") if isinstance(tokenizer, TokenizerRecord) else None
        if not isinstance(found, Mapping):
            wrong.append(f"{name} (no tokenizer)")
        elif (found if isinstance(found, Tokens) else tokens_of(found.items())).summed() != tokens_of(
            _entries(tokens)
        ).summed():
            wrong.append(f"{name} (another vocabulary)")
    if wrong:
        got = f"{len(wrong)} other vocabularies than {vocab_name}"
        raise InputError(where, got, f"the same for {listed(wrong)}")


def _entries(tokens: VocabularyTable) -> Iterator[tuple[object, object]]:
    for part in tokens.table.to_batches(_PART):
        yield from zip(part["value"].to_pylist(), part["id"].to_pylist(), strict=True)


def processor_normalizers(processor: Processor, where: str) -> dict[str, Standardize | MinMax]:
    """The fitted scalers of numeric features, as transforms. Raises InputError for one that is none of ours."""
    out: dict[str, Standardize | MinMax] = {}
    for key, record in as_mapping(where, processor.fields.get("processor_dict")).items():
        name, _, kind = str(key).rpartition("::")
        if kind == "normalizer":
            scaler = record.fields.get("normalizer") if isinstance(record, NormalizerRecord) else None
            out[name] = _transform(f"{where}: {key}", scaler.scaler if isinstance(scaler, BoundTransform) else scaler)
    return out


def _transform(where: str, scaler: object) -> Standardize | MinMax:
    def number(field: str) -> float:
        values = getattr(scaler.fields.get(field), "values", None)  # type: ignore[attr-defined]
        if not isinstance(values, np.ndarray) or values.shape != (1,):
            raise InputError(f"{where}: {field}", shown(values), "one number")
        return float(values[0])

    try:
        if isinstance(scaler, StandardScalerRecord):
            return Standardize(mean=number("mean_"), std=number("scale_"))
        if isinstance(scaler, MinMaxScalerRecord):
            clip = bool(scaler.fields.get("clip", False))
            if scaler.fields.get("feature_range") not in ((0, 1), [0, 1]):
                raise InputError(f"{where}: feature_range", scaler.fields.get("feature_range"), "(0, 1)")
            # sklearn computes x * scale_ + min_, which this is: a range of 0 has scale_ 1 there.
            low, scale = number("data_min_"), number("scale_")
            if scale == 0:
                raise InputError(f"{where}: scale_", scale, "a fitted scaler")
            return MinMax(minimum=low, maximum=low + 1 / scale, clip=clip)
    except InputError as e:
        raise e.at(e.where if e.where.startswith(where) else f"{where}: {e.where}") from None
    raise InputError(where, getattr(scaler, "kind", type(scaler).__name__), "a StandardScaler or MinMaxScaler")
