"""Which rows of which tables a module reads: its embedding lookups as sources of the schema's features. Raw ids and numbers are
followed from the inputs to the lookups; nothing is computed here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.compiler.operations.strided import Refused
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema, Hash, Identity

Indices = npt.NDArray[np.int64]
CONSTANT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Raw:
    """A tensor of raw inputs, as they came: per element of a row, which input column it is and what was added to the id.

    at, shift: int64[sizes of a row]; of an element that is no input, `at` is CONSTANT, and `shift` what it is. flat: its rows
        were joined into one dimension, [B * columns].
    """

    at: Indices
    shift: Indices
    flat: bool = False

    def of(self, change: Callable[[Indices], Indices]) -> "Raw":
        """The same view taken of both."""
        return replace(self, at=change(self.at), shift=change(self.shift))


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """Embeddings [B, values, dim] of one feature of several values, before their sum: nothing else may read them."""

    feature: str
    slot: "Slot"


@dataclass(frozen=True, slots=True)
class Slot:
    """Columns that hold an embedding: `width` from `offset` on of the value `base` ("x", or "w" for first-order weights)."""

    base: str
    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class Part:
    """Columns of a table: rows from `start` on of a weight [rows, width], or the transpose of one [width, 1]."""

    weight: str
    start: int
    width: int


@dataclass
class Lookups:
    """Collects the sources that a module reads, and what their tables are made of.

    columns: (feature, position) of each raw column. weights: name -> [rows, dim].
    told: of features of several values the id that the module gets for an absent one, where it does not say so itself.
    complete: whether `told` has what an earlier pass found: the masks, which come behind the lookups.
    padding: of each feature of several values the id that the module takes for an absent one.
    """

    schema: FeatureSchema
    columns: Sequence[tuple[str, int]]
    told: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True
    sources: dict[tuple[str, str | None], Slot] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=lambda: {"x": 0, "w": 0})
    parts: dict[str, list[Part]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)

    def number(self, at: int) -> Slot:
        """A number as it is."""
        feature, _ = self.columns[at]
        if self.schema.feature(feature).is_id:
            raise Refused(f"got the ids of feature {feature!r} as numbers, expected them in an embedding lookup alone")
        return self._source(feature, None, 1)

    def scaled(self, at: int, name: str, weight: torch.Tensor) -> Slot | None:
        """A number times the vector weight [dim, 1], if the schema has a table of one row for it."""
        feature, _ = self.columns[at]
        f = self.schema.feature(feature)
        table = f.first_order_table if weight.shape[0] == 1 and f.first_order_table else f.table
        if f.is_id or table is None:
            return None
        return self._part(feature, table, Part(name, -1, weight.shape[0]), weight.t())

    def embedded(self, raw: Raw, name: str, weight: torch.Tensor) -> list[Slot]:
        """The embedding of each id of a row, in order."""
        return [
            self._id_row(*self.columns[at], shift, name, weight)
            for at, shift in zip(raw.at.flatten().tolist(), raw.shift.flatten().tolist(), strict=True)
        ]

    def bag(
        self, raw: Raw, name: str, weight: torch.Tensor, padding: int | None, *, sums: bool, mode: str = "sum"
    ) -> Bags | None:
        """The ids of one row as one feature's values, or None if they are of features of one value.

        sums: the padding's row is added too, so it must be zero; else it is left out.
        """
        features = {self.columns[at][0] for at in raw.at.flatten().tolist()}
        several = sorted(f for f in features if self.schema.feature(f).max_values > 1)
        pooled = [f for f in several if self.schema.pooling(f, self._table(f, name, weight)) != "none"]
        for feature in pooled if sums else ():
            self._check_padding(feature, name, weight, padding)
        if not pooled and (sums or not several):
            return None
        feature, f = (pooled or several)[0], self.schema.feature((pooled or several)[0])
        if [self.columns[at] for at in raw.at.flatten().tolist()] != [(feature, i) for i in range(f.max_values)]:
            raise Refused(f"got some of the values of feature {feature!r}, expected all {f.max_values} of them in their order")
        if raw.shift.any():
            raise Refused(f"got shifted ids of feature {feature!r} of several values, expected a table of their own")
        pooling = self.schema.pooling(feature, self._table(feature, name, weight))
        if pooling != mode and sums:  # an nn.Embedding: what the module makes of the values is not known here
            expected = f"nn.EmbeddingBag(.., mode={pooling!r}); pooling 'none' in the schema leaves the values to the module"
            raise Refused(f"got an nn.Embedding of feature {feature!r}, whose schema pools by {pooling!r}, expected {expected}")
        if pooling != mode:
            raise Refused(f"got pooling {mode!r} of feature {feature!r}, expected {pooling!r} as the schema says")
        if padding is None:
            raise Refused(f"got no padding_idx for feature {feature!r} of several values, expected the id of an absent value")
        if mode != "sum" or weight[padding].any():
            _check_absent(f, padding)
        self._absent(feature, padding)
        return Bags(feature, self._id_row(feature, -1, int(raw.shift.flat[0]), name, weight))

    def ended(self, raw: Raw, name: str, weight: torch.Tensor, padding: int | None) -> int | None:
        """The id whose row the module reads where a list has ended, of the steps of a sequence; None: none, or one of zeros."""
        features = {self.columns[at][0] for at in raw.at.flatten().tolist()}
        found = {}
        for feature in sorted(f for f in features if self.schema.feature(f).max_values > 1):
            own = self._told(feature) if padding is None else padding
            if own is not None:
                self._absent(feature, own)
                found[feature] = own
            elif self.complete:
                raise Refused(
                    f"got no id of an absent value of feature {feature!r}, expected a padding_idx of its nn.Embedding, a mask "
                    "such as `ids != 0`, or (of integers that are ids) the feature's padding_value"
                )
        ids = set(found.values())
        if not any(weight[i].any() for i in ids):
            return None
        if len(features) > 1 or raw.shift.any():
            raise Refused(
                f"got a row of {name} at the ids of absent values {sorted(ids)} that is not zero, expected zeros where "
                "features are looked up together"
            )
        return ids.pop()

    def _told(self, feature: str) -> int | None:
        f = self.schema.feature(feature)
        assert isinstance(f, Categorical)  # only they have several values
        given = f.padding_value if isinstance(f.encoder, Identity) and isinstance(f.padding_value, int) else None
        return self.told.get(feature, given)

    def there(self, raw: Raw) -> list[Slot]:
        """For each id of a sequence whether there is one: 1, or 0 where the list has ended."""
        slots = []
        for feature, position in (self.columns[at] for at in raw.at.flatten().tolist()):
            slot = self._source(feature, None, self.schema.feature(feature).max_values)
            slots.append(Slot(slot.base, slot.offset + position, 1))
        return slots

    def mask(self, raw: Raw, padding: int) -> list[Slot]:
        """For each id of a row whether there is one: 1, or 0 where the list has ended and the module has the id `padding`."""
        for at, shift in zip(raw.at.flatten().tolist(), raw.shift.flatten().tolist(), strict=True):
            feature, _ = self.columns[at]
            f = self.schema.feature(feature)
            if f.max_values == 1 or f.pooling != "none" or shift:
                how = "of one value" if f.max_values == 1 else f"with pooling {f.pooling!r}" if not shift else "shifted"
                raise Refused(
                    f"got a comparison of ids of feature {feature!r} {how}, expected those of a sequence (pooling 'none') "
                    "with the id of an absent value"
                )
            _check_absent(f, padding)
            self._absent(feature, padding)
        return self.there(raw)

    def table(self, name: str) -> list[torch.Tensor]:
        """Of a table of the schema [rows, width] of each weight that its columns lie in, side by side.

        Raises:
            InputError: what the module reads does not make a table of the schema's shape.
        """
        table, parts = self.schema.table(name), self.parts.get(name, [])
        found = []
        for part in parts:
            weight = self.weights[part.weight]
            whole = part.start < 0
            start = max(0, part.start)
            stacked = len({p.start for ps in self.parts.values() for p in ps if p.weight == part.weight}) > 1
            if len(weight) < start + table.rows or (not stacked and not whole and len(weight) != table.rows):
                raise InputError(f"tables.{name}.rows", table.rows, f"{len(weight) - start}, the rows of {part.weight}")
            found.append(weight[start : start + table.rows])
        dims = [p.width for p in parts]
        if sum(dims) != table.dim:
            made = " + ".join(f"{p.width} of {p.weight}" for p in parts)
            if not parts:
                rule = "one (of a number: nn.Linear(1, dim, bias=False)), or no table in the schema"
                raise InputError.worded(f"tables.{name}", "no embedding that reads it", rule)
            raise InputError(f"tables.{name}.dim", table.dim, f"{sum(dims)}: {made}")
        return found

    def rows(self, name: str) -> int:
        """Those of a table: of a weight that stacks several, up to where the next one begins."""
        part = self.parts[name][0]
        starts = {p.start for parts in self.parts.values() for p in parts if p.weight == part.weight}
        return min([s for s in starts if s > part.start], default=len(self.weights[part.weight])) - max(0, part.start)

    def _table(self, feature: str, name: str, weight: torch.Tensor) -> str | None:
        """Of weights of one column the first is of first order; others (of a mixture of regressions) lie in the table."""
        f = self.schema.feature(feature)
        taken = f.first_order_table is None or any(p.weight != name for p in self.parts.get(f.first_order_table, ()))
        return f.table if taken or weight.shape[1] > 1 else f.first_order_table

    def _check_padding(self, feature: str, name: str, weight: torch.Tensor, padding: int | None) -> None:
        if padding is None:
            raise Refused(f"got no padding_idx for feature {feature!r} of several values, expected the id of an absent value")
        if weight[padding].any():
            raise Refused(
                f"got a row of {name} at padding_idx {padding} that is not zero, expected zeros: absent values add nothing"
            )
        self._absent(feature, padding)

    def _absent(self, feature: str, padding: int) -> None:
        """Notes the id that the module takes for an absent value."""
        if self.padding.setdefault(feature, padding) != padding:
            raise Refused(
                f"got {padding} as the absent value of feature {feature!r}, expected {self.padding[feature]} as elsewhere"
            )

    def _id_row(self, feature: str, position: int, shift: int, name: str, weight: torch.Tensor) -> Slot:
        f, table = self.schema.feature(feature), self._table(feature, name, weight)
        if not f.is_id:
            raise Refused(f"got the number {feature!r} as an id, expected a categorical or bucketized feature")
        if table is None:
            raise Refused(f"got an embedding of feature {feature!r}, expected it to have a table in the schema")
        if position >= 0 and f.max_values > 1 and self.schema.pooling(feature, table) != "none":
            raise Refused(f"got one value of feature {feature!r}, which has up to {f.max_values}, expected their sum or mean")
        slot = self._part(feature, table, Part(name, shift, weight.shape[1]), weight)
        ahead = position * self.schema.table(table).dim if position > 0 and f.max_values > 1 else 0
        return Slot(slot.base, slot.offset + ahead, slot.width)

    def _part(self, feature: str, table: str, part: Part, weight: torch.Tensor) -> Slot:
        if self.weights.setdefault(part.weight, weight) is not weight and self.weights[part.weight].shape != weight.shape:
            raise Refused(f"got {part.weight} both as a table and transposed, expected one use")
        parts = self.parts.setdefault(table, [])
        if part not in parts:
            parts.append(part)
        before = sum(p.width for p in parts[: parts.index(part)])
        dim = self.schema.table(table).dim
        if before + part.width > dim:
            made = " + ".join(f"{p.width} of {p.weight}" for p in parts)
            raise Refused(f"got {made} for table {table!r}, expected {dim} columns as the schema says")
        slot = self._source(feature, table, self.schema.columns_read(feature, table))
        return Slot(slot.base, slot.offset + before, part.width)

    def _source(self, feature: str, table: str | None, width: int) -> Slot:
        known = self.sources.get((feature, table))
        if known is None:
            base = "w" if table is not None and table == self.schema.feature(feature).first_order_table else "x"
            known = self.sources[feature, table] = Slot(base, self.widths[base], width)
            self.widths[base] += width
        return known


def _check_absent(f: Feature, padding: int) -> None:
    """Refuses a feature whose encoder would count what the module leaves out, the row at `padding`, as a value."""
    assert isinstance(f, Categorical)
    if f.missing_id != -1 or (isinstance(f.encoder, Identity) and f.padding_value != padding):
        raise Refused(
            f"got padding_value {f.padding_value!r} and missing_id {f.missing_id} of feature {f.name!r}, expected {padding} "
            "and -1: what the module leaves out must be absent in requests too"
        )
    match f.encoder:
        case Hash(first_id=first, buckets=buckets):
            given = (first or 0) <= padding < (first or 0) + buckets
        case Identity(out_of_range="error"):
            given = False
        case _:
            given = f.oov_id == padding
    if given:
        raise Refused(
            f"got padding_idx {padding}, an id that the encoder of feature {f.name!r} gives to values, expected another"
        )
