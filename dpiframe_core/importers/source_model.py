"""A source model in our terms: what a bundle stores of it, and its own forward on encoded rows.

The forward reads tables and layers as the source library does, in float64; it shares only the encoded
ids with our graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import IdSection
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.graph.architecture import Architecture
from dpiframe_core.graph.graph import Graph


@dataclass(frozen=True, slots=True, eq=False)
class SourceLayers:
    """What lies behind a source model's embeddings: our architecture and dense parameters for it, and its own logit."""

    architecture: Architecture
    dense: Mapping[str, Tensor]
    logit: Callable[[Inputs], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SourceModel:
    """Filled by the importers; what `write_import` takes.

    Attributes:
        library, model: for people, such as "FuxiCTR" and "DeepFM".
        dense: our parameter name -> float32. tables: by name. vocabularies: by file name.
        logit: float64[n, 1] from the inputs, in the source's semantics.
        label: the column of labels in files of raw rows, if the source names one.
        own: the source model itself, where it is at hand, called on encoded rows: float64[n, tasks], probabilities.
        graph: what is computed, of an architecture that is a graph file. tasks: a name for each column of scores.
        defaults: settings that the run's configuration does not name, with what the library's class has, which was taken.
    """

    library: str
    model: str
    architecture: Architecture
    schema: FeatureSchema
    dense: Mapping[str, Tensor]
    tables: Mapping[str, Tensor]
    vocabularies: Mapping[str, VocabularyTable]
    logit: Callable[[Inputs], Tensor]
    label: str | None = None
    own: Callable[[Inputs], Tensor] | None = None
    graph: Graph | None = None
    tasks: tuple[str, ...] = ("click",)
    defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def taken(self) -> str:
        """The defaults, in words."""
        return in_words(self.defaults)

    @property
    def taken_line(self) -> str:
        """A line for people, or nothing."""
        return f"\nnot in the configuration, taken as the library's class has it: {self.taken}" if self.defaults else ""

    def probabilities(self, block: RowBlock) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """float64[n, tasks] of encoded rows."""
        with torch.no_grad():
            p: np.ndarray[tuple[int, int], np.dtype[np.float64]] = torch.sigmoid(self.logit(Inputs(self, block))).numpy()
        return p

    def reference(self, block: RowBlock) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """The same from the source model itself, where it is at hand."""
        return self.probabilities(block) if self.own is None else self.own(Inputs(self, block)).numpy()


class Inputs:
    """Encoded rows as embeddings: what the first layers of a source model see."""

    def __init__(self, model: SourceModel, block: RowBlock) -> None:
        self._schema, self._tables, self._block = model.schema, model.tables, block

    def x(self) -> Tensor:
        """float64[n, D]: all features side by side, in the schema's order."""
        return torch.cat([self.value(f) for f in self._schema.features], 1)

    def fields(self) -> Tensor:
        """float64[n, F, dim]: the features that have a table, which must share one dim."""
        return torch.stack([self.value(f) for f in self._schema.features if f.table is not None], 1)

    def first_order(self) -> Tensor:
        """float64[n, 1]: the sum of the features' linear weights."""
        terms = [self._first(f) for f in self._schema.features if f.first_order_table is not None]
        return torch.stack(terms).sum(0)

    def named(self, feature: str) -> Tensor:
        """float64[n, dim] (or the number itself, [n, 1])."""
        return self.value(self._schema.feature(feature))

    def value(self, f: Categorical | Numeric) -> Tensor:
        return self._read(f, f.table, f.pooling)

    def sequence(self, name: str) -> tuple[Tensor, Tensor]:
        """(float64[n, L, dim], zero where there is no value; bool[n, L]: whether there is one) of a list."""
        f = self._schema.feature(name)
        assert f.table is not None
        ids = torch.from_numpy(self._column(f).astype(np.int64))
        there = ids >= 0
        return self._tables[f.table][ids.clamp(min=0)].double() * there[:, :, None], there

    def _first(self, f: Categorical | Numeric) -> Tensor:
        return self._read(f, f.first_order_table, self._schema.pooling(f.name, f.first_order_table))

    def _read(self, f: Categorical | Numeric, table: str | None, pooling: str) -> Tensor:
        column = self._column(f)
        if table is None:
            return torch.from_numpy(column.astype(np.float64))
        weight = self._tables[table]  # rows first, then float64: a table may be most of the memory that there is
        if not f.is_id:
            return torch.from_numpy(column.astype(np.float64)) * weight[0].double()
        ids = torch.from_numpy(column.astype(np.int64))
        if f.max_values == 1:
            return weight[ids[:, 0]].double()
        there, rows = (ids >= 0).double(), weight[ids.clamp(min=0)].double()
        if pooling == "max":  # of an empty list: zero, as our lookup gives (DeepCTR-Torch gives -1e9)
            lowest = rows.masked_fill(ids[:, :, None] < 0, -torch.inf).amax(1)
            return torch.where(lowest == -torch.inf, 0.0, lowest)
        total = (rows * there[:, :, None]).sum(1)
        return total / there.sum(1, keepdim=True).clamp(min=1) if pooling == "mean" else total

    def column(self, name: str) -> np.ndarray[tuple[int, int], np.dtype[np.generic]]:
        """[n, width]: a feature's ids, -1 where a list has no value, or its numbers."""
        return self._column(self._schema.feature(name))

    def _column(self, f: Categorical | Numeric) -> np.ndarray[tuple[int, int], np.dtype[np.generic]]:
        place, block = self._schema.columns[f.name], self._block
        if f.is_id:
            section: IdSection = "context_ids" if place.section == "context_ids" else "candidate_ids"
            values = block.wide_ids(section)[:, place.start : place.start + place.width]
        else:
            values = getattr(block, place.section)[:, place.start : place.start + place.width]
        return values[block.request_of_row] if place.section.startswith("context") else values


def check_padding(where: str, weight: Tensor) -> None:
    """Our lookup leaves padding out, which is the source's sum only if its padding row is zero.

    Raises:
        InputError: it is not.
    """
    if bool(weight[0].any()):
        raise InputError(where, "a padding row that is not zero", "zeros in row 0")


def tables_in_order(schema: FeatureSchema, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {t.name: tables[t.name].float().contiguous() for t in schema.tables}


def required(config: Mapping[str, object], key: str, where: str, kinds: Sequence[type]) -> Any:
    """A hyper-parameter that the checkpoint does not hold; `where` names it.

    Raises:
        InputError: it is not there or of another type.
    """
    if key not in config:
        raise InputError(where, "nothing", "the hyper-parameter, which the checkpoint does not hold")
    value = config[key]
    if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
        raise InputError(where, value, " or ".join(kind.__name__ for kind in kinds))
    return value


def in_words(settings: Mapping[str, object]) -> str:
    """Settings as people read them, one after the other."""
    return ", ".join(f"{key} = {value}" for key, value in settings.items())
