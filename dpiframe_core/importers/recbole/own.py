"""A RecBole model of any class, the user's own: made of the spec's settings and features, its `predict` compiled.

A class asks its configuration and its data set for little. Both are stand-ins here: RecBole's own want the files of the data
set, and a NumPy older than ours.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpiframe_core.errors import InputError
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, SpecFile, read_spec
from dpiframe_core.importers.own_class import own_maker, with_weights
from dpiframe_core.importers.own_module import own_model
from dpiframe_core.importers.recbole.tables import token_rows
from dpiframe_core.importers.source_model import SourceModel
from dpiframe_core.importers.state_dict import read_checkpoint


def recbole_own(checkpoint: Path, spec: Path, source: str) -> SourceModel:
    """As `recbole`, by the class or function that `source` names ("FILE.py:NAME"), which is run with (config, dataset).

    Raises:
        InputError: also: RecBole is not installed, no such name, it refuses, the checkpoint does not fit it, or `compile`
            cannot take it over; each named.
    """
    file, weights = read_spec(spec), read_checkpoint(checkpoint)
    dataset, name = _Dataset(file), source.rpartition(":")[2]
    config = _Config({"device": "cpu", "LABEL_FIELD": "label", "numerical_features": dataset.numbers} | file.spec.settings)
    make = own_maker(source, config, dataset)

    def made() -> nn.Module:
        try:
            return make()
        except (AttributeError, TypeError) as e:
            if not config.unset:
                raise
            got = f"no {', '.join(dict.fromkeys(config.unset))}, and {e}"
            raise InputError(f"{file.where}: settings", got, f"all that {name} reads of its configuration") from e

    model = _Predicted(with_weights(made, weights, f"--source {name}"), dataset.numbers)
    spec_read = file.spec.model_copy(update={"features": tuple(_read(f) for f in file.spec.features)})
    return own_model("RecBole", name, model, replace(file, spec=spec_read), "mapping")


class _Config(dict[str, Any]):
    """RecBole's reads as None what is not set: here that is noted. Settings are attributes, too."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.unset: list[str] = []

    def __missing__(self, key: str) -> None:
        self.unset.append(key)

    def __getattr__(self, key: str) -> Any:
        return self[key]


class _Dataset:
    """What a context-aware model asks of its data set."""

    def __init__(self, file: SpecFile) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of theirs, at import
                from recbole.utils import FeatureType
        except ImportError as e:
            raise InputError("--source", f"no RecBole here ({e})", "RecBole installed: docs/import-recbole.md") from None
        features = file.spec.features
        self.numbers = [f.name for f in features if isinstance(f, DenseFeature)]
        self._rows = {f.name: 2 if isinstance(f, DenseFeature) else token_rows(file, f) for f in features}
        self.field2type = dict.fromkeys(self.numbers, FeatureType.FLOAT) | {
            f.name: FeatureType.TOKEN_SEQ if f.max_values > 1 else FeatureType.TOKEN
            for f in features
            if not isinstance(f, DenseFeature)
        }

    def fields(self, source: object = None) -> list[str]:
        return list(self._rows)

    def num(self, field: str) -> int:
        return self._rows[field]


class _Predicted(nn.Module):
    """`predict` of features by name; a number stands beside the index of its row, as data sets have it."""

    def __init__(self, model: nn.Module, numbers: list[str]) -> None:
        super().__init__()
        self.model: Any = model
        self._numbers = numbers

    def forward(self, x: Mapping[str, Tensor]) -> Any:
        return self.model.predict(
            {name: torch.stack([v, torch.ones_like(v)], 1) if name in self._numbers else v for name, v in x.items()}
        )


def _read(f: SparseFeature | DenseFeature) -> SparseFeature | DenseFeature:
    """`[PAD]` is read for a token that is missing or unknown; a list is pooled by the model, which leaves it out."""
    if isinstance(f, DenseFeature):
        return f
    if f.max_values > 1:
        return f.model_copy(update={"pooling": "none", "missing_id": -1})
    return f.model_copy(update={"oov_id": f.oov_id or 0, "missing_id": f.missing_id or 0})
