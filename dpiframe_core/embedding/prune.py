"""Which rows of tables are read least, and a model without them: schema, vocabularies, tables and encoded rows renumbered.

A dropped id becomes the one that its feature reads for unknown values. How often ids are read is counted on rows that others
bring; without any, ids are taken to be by falling frequency, as vocabularies of trained models are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import Column, IdSection
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema, Hash, Identity, Table, Vocabulary
from dpiframe_core.features.vocabulary import VocabularyTable, id_bound, vocabulary_name

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IdSpace:
    """Tables whose rows are numbered alike, and the features that read them.

    They share a feature (embeddings and first-order weights), or their features share a vocabulary. `rows`: of the largest.
    """

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    rows: int

    def to_drop(self, share: float) -> int:
        """How many rows a share of them is, rounded down."""
        return int(share * self.rows + 1e-9)

    @property
    def names(self) -> set[str]:
        """Of the tables."""
        return {t.name for t in self.tables}

    @property
    def categories(self) -> tuple[Categorical, ...]:
        return tuple(f for f in self.features if isinstance(f, Categorical))

    def count(self, block: RowBlock, schema: FeatureSchema, counts: Int64s) -> None:
        """Adds to counts, int64[rows], how often the rows of a block read each id."""
        for f in self.categories:
            place = schema.columns[f.name]
            ids = _ids(block, place)
            if place.section == "context_ids":
                ids = ids[block.request_of_row]
            found, times = np.unique(ids[ids >= 0], return_counts=True)
            counts[found] += times


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Filled by `most_read`. ids: int64[k], those of the space that stay, ascending; new: int64[rows], -1 for a dropped one."""

    space: IdSpace
    ids: Int64s
    new: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Pruned:
    """Parts of a bundle without the dropped rows. Filled by `prune`."""

    schema: FeatureSchema
    vocabularies: dict[str, VocabularyTable]
    tables: dict[str, torch.Tensor]
    block: RowBlock


def id_spaces(schema: FeatureSchema) -> list[IdSpace]:
    """All of a model's, each table in one of them."""
    found: list[tuple[set[str], list[Feature]]] = []
    for f in schema.features:
        names = {f"table {name}" for name in (f.table, f.first_order_table) if name is not None}
        if isinstance(f, Categorical) and isinstance(f.encoder, Vocabulary):
            names.add(f"vocabulary {vocabulary_name(f)}")
        joined = [space for space in found if space[0] & names]
        found = [space for space in found if not space[0] & names]
        found.append((names.union(*(n for n, _ in joined)), [*(g for _, features in joined for g in features), f]))
    spaces = []
    for names, features in found:
        if tables := tuple(t for t in schema.tables if f"table {t.name}" in names):
            spaces.append(IdSpace(tables, tuple(features), max(t.rows for t in tables)))
    return spaces


def check_prunable(space: IdSpace, counted: bool) -> None:
    """Whether its ids can be renumbered, and it is known which of them are read least. `counted`: on rows.

    Raises:
        InputError: a feature, with the reason.
    """
    for f in space.features:
        if not isinstance(f, Categorical):
            raise InputError(f"features.{f.name}.transforms", "bucketize", "a vocabulary or raw ids: buckets cannot be dropped")
        if isinstance(f.encoder, Hash):
            raise InputError(f"features.{f.name}.encoder", "hash", "a vocabulary or raw ids: hashed ids cannot be renumbered")
        if f.oov_id is None:
            raise InputError(f"features.{f.name}.oov_id", None, "a row for values unknown, which dropped ids can read")
        if isinstance(f.encoder, Identity) and not counted:
            raise InputError(f"features.{f.name}.encoder", "identity", "a vocabulary, or a trace: raw ids have no known order")


def most_read(space: IdSpace, share: float, vocabularies: Mapping[str, VocabularyTable], counts: Int64s | None = None) -> Kept:
    """The ids of a space but for a share of its rows, those of the lowest counts (int64[rows]) and of equal ones the last.

    Rows for unknown, missing and padding values stay, whatever their counts.
    """
    order: npt.NDArray[np.float64] = np.arange(space.rows, dtype=np.float64) if counts is None else -counts.astype(np.float64)
    special = np.unique(np.fromiter(_special(space, vocabularies), np.int64))
    order[special] = -np.inf
    kept = max(space.rows - space.to_drop(share), len(special))
    ids = np.sort(np.argsort(order, kind="stable")[:kept])
    new = np.full(space.rows, -1, np.int64)
    new[ids] = np.arange(kept)
    return Kept(space, ids, new)


def prune(
    schema: FeatureSchema,
    kept: Sequence[Kept],
    vocabularies: Mapping[str, VocabularyTable],
    tables: Mapping[str, torch.Tensor],
    block: RowBlock,
) -> Pruned:
    """A model without the rows that are not kept, of spaces that `check_prunable` let pass. `block`: encoded rows of it.

    Vocabularies lose the values of dropped ids. A feature of raw ids gets a vocabulary, of the integers that stay.

    Raises:
        InputError: such a vocabulary has the name of another one.
    """
    features, sizes, maps = dict[str, Feature](), dict[str, Table](), dict[str, Int64s]()
    tables, named = dict(tables), dict(vocabularies)
    for k in kept:
        for t in k.space.tables:
            rows = k.ids[k.ids < t.rows]
            tables[t.name] = tables[t.name][torch.from_numpy(rows)]
            sizes[t.name] = t.model_copy(update={"rows": len(rows)})
        for name in {n for f in k.space.categories if (n := vocabulary_name(f)) is not None}:
            named[name] = _renumbered(vocabularies[name], k.new)
        for f in k.space.categories:
            features[f.name], maps[f.name] = _renumbered_feature(f, k), np.where(k.new < 0, k.new[f.oov_id or 0], k.new)
            if isinstance(f.encoder, Identity):
                if f.name in named:
                    raise InputError(f"features.{f.name}.name", f.name, "another one than the vocabulary of other features")
                values = k.ids[k.ids < id_bound(schema, f)]
                named[f.name] = _vocabulary(pa.array(values), k.new[values])
    smaller = FeatureSchema(
        features=tuple(features.get(f.name, f) for f in schema.features),
        tables=tuple(sizes.get(t.name, t) for t in schema.tables),
    )
    return Pruned(smaller, named, tables, _encoded_anew(block, schema, smaller, maps))


def _renumbered_feature(f: Categorical, kept: Kept) -> Categorical:
    ids = {key: int(kept.new[i]) for key in ("oov_id", "missing_id") if (i := getattr(f, key)) is not None and i >= 0}
    return f.model_copy(update={"encoder": Vocabulary() if isinstance(f.encoder, Identity) else f.encoder, **ids})


def _special(space: IdSpace, vocabularies: Mapping[str, VocabularyTable]) -> Iterable[int]:
    """The ids that stand for no value of their own."""
    for f in space.categories:
        yield from (i for i in (f.oov_id, f.missing_id) if i is not None and i >= 0)
        name, padding = vocabulary_name(f), f.padding_value
        if name is not None and padding is not None:
            table = vocabularies[name].table
            yield from table.filter(pc.equal(table["value"], padding))["id"].to_pylist()
        elif isinstance(padding, int) and 0 <= padding < space.rows:
            yield padding


def _renumbered(vocabulary: VocabularyTable, new: Int64s) -> VocabularyTable:
    ids = new[vocabulary.table["id"].to_numpy()]
    return _vocabulary(vocabulary.table["value"].filter(pa.array(ids >= 0)), ids[ids >= 0])


def _vocabulary(values: pa.Array | pa.ChunkedArray, ids: Int64s) -> VocabularyTable:
    return VocabularyTable(pa.table({"value": values, "id": pa.array(ids)}))


def _ids(block: RowBlock, place: Column) -> Int64s:
    """int64[n or q, width], -1 where a list has ended."""
    raw = block.column(place)
    return np.where(raw == np.array(-1).astype(raw.dtype), -1, raw.astype(np.int64))


def _encoded_anew(block: RowBlock, schema: FeatureSchema, smaller: FeatureSchema, maps: Mapping[str, Int64s]) -> RowBlock:
    """The rows with the ids of the features in `maps` renumbered."""
    out = RowBlock.allocate(smaller.block_layout, block.rows, block.contexts, block.oov_count)
    out.request_of_row[:] = block.request_of_row
    out.context_dense[:], out.candidate_dense[:] = block.context_dense, block.candidate_dense
    sections: tuple[IdSection, ...] = ("context_ids", "candidate_ids")
    for section in sections:
        ids = block.wide_ids(section).astype(np.int64)
        for name, new in maps.items():
            place = schema.columns[name]
            if place.section == section:
                own = ids[:, place.start : place.start + place.width]
                own[:] = np.where(own < 0, -1, new[own])
        out.set_ids(section, ids)
    return out
