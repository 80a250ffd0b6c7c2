"""The feature schema of a model: which features it takes, how each becomes ids or numbers, and which tables they read.

Pure data (pydantic, frozen, unknown keys refused). It knows nothing of values (`encoder`) nor of weights (`bundle`).
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpiframe_core.features.block_layout import SECTIONS, BlockLayout, Column, Section, section_of
from dpiframe_core.features.transforms import Bucketize, Log, MinMax, Standardize
from dpiframe_core.strict import Name, Strict
from kernels.lookup.id_record import IdRecord, id_bytes

Scope = Literal["context", "candidate"]
Pooling = Literal["sum", "mean", "max", "none"]
TableDtype = Literal["float32", "float16", "bfloat16", "int8"]
FLOAT32_MAX = 3.4028234663852886e38


class Vocabulary(Strict):
    """Raw value -> id by the table `vocab/<file>.parquet` (`file` defaults to the feature's name; share it by naming one)."""

    type: Literal["vocabulary"] = "vocabulary"
    file: Name | None = None


class Hash(Strict):
    """id = first_id + murmur3_x86_32(utf-8 bytes of the value, seed) mod buckets. Integers are hashed as decimal text.

    `first_id` may be left out where the table has exactly `buckets` rows: it is 0 then.
    """

    type: Literal["hash"] = "hash"
    algorithm: Literal["murmur3_32"] = "murmur3_32"
    buckets: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    first_id: Annotated[int, Field(ge=0)] | None = None


class Identity(Strict):
    """The raw integer is the id. Outside [0, rows) it is refused, or reads the out-of-vocabulary row if the schema says so."""

    type: Literal["identity"] = "identity"
    out_of_range: Literal["error", "oov"] = "error"


class Categorical(Strict):
    """A feature whose raw value (text or integer) becomes one id, or up to `max_values` ids pooled by sum, mean or max.

    With pooling "none" they stay a sequence: `max_values` rows side by side, the last ones zero where the list is shorter.
    `missing_id` is read for null (and for an empty list; -1, allowed only if `max_values` > 1, reads a zero vector), `oov_id`
    for a value the encoder does not know; without one, such a value is refused. `first_order_table` holds the scalar weights of
    a linear ("wide", first-order) term, pooled by `first_order_pooling` (None: as `pooling` says). Of a feature with
    `max_values` > 1, text joined by the `splitter` is a list too, and values equal to `padding_value` are null. `align` says
    where a shorter list stands among the `max_values` places: from the first one on, or up to the last one ("pre" padding),
    which position embeddings tell apart.
    """

    kind: Literal["categorical"] = "categorical"
    name: Name
    scope: Scope = "candidate"
    values: Literal["string", "int"] = "string"
    encoder: Annotated[Vocabulary | Hash | Identity, Field(discriminator="type")]
    table: Name
    first_order_table: Name | None = None
    missing_id: Annotated[int, Field(ge=-1)] | None = None
    oov_id: Annotated[int, Field(ge=0)] | None = None
    max_values: Annotated[int, Field(ge=1, le=1024)] = 1
    too_many: Literal["error", "keep_first", "keep_last"] = "error"
    align: Literal["first", "last"] = "first"
    pooling: Pooling = "sum"
    first_order_pooling: Literal["sum", "mean", "max"] | None = None
    splitter: Annotated[str, Field(min_length=1, max_length=8)] | None = None
    padding_value: str | int | None = None

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if isinstance(self.encoder, Identity) and self.values != "int":
            raise ValueError(f"features.{self.name}.values: got {self.values!r}, expected 'int' for an identity encoder")
        if isinstance(self.encoder, Identity) and self.encoder.out_of_range == "oov" and self.oov_id is None:
            raise ValueError(f"features.{self.name}.oov_id: got none, expected one, as out_of_range is 'oov'")
        for key, value in (("splitter", self.splitter), ("padding_value", self.padding_value)):
            if value is not None and self.max_values == 1:
                raise ValueError(f"features.{self.name}.{key}: got {value!r}, expected none for a feature of one value")
        if self.padding_value is not None and isinstance(self.padding_value, str) != (self.values == "string"):
            got = repr(self.padding_value)
            raise ValueError(f"features.{self.name}.padding_value: got {got}, expected one of the kind {self.values}")
        if self.align != "first" and self.max_values == 1:
            raise ValueError(f"features.{self.name}.align: got {self.align!r}, expected 'first' for a feature of one value")
        if self.first_order_pooling is not None and self.table == self.first_order_table:
            raise ValueError(f"features.{self.name}.first_order_pooling: got one for the table itself, expected two tables")
        return self

    @property
    def is_id(self) -> bool:
        return True


class Numeric(Strict):
    """A number: transformed in the order given; missing (null) becomes `missing_value` after the transforms, or `missing_id`
    after bucketize, and is refused without one.

    Without `table` the number itself is a column of the model's input. With a table of one row it scales that row
    (x * e, the usual numeric embedding); after `bucketize` it is an id into its table.
    """

    kind: Literal["numeric"] = "numeric"
    name: Name
    scope: Scope = "candidate"
    transforms: tuple[Annotated[Log | Standardize | MinMax | Bucketize, Field(discriminator="type")], ...] = ()
    missing_value: Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)] | None = None
    missing_id: Annotated[int, Field(ge=0)] | None = None
    table: Name | None = None
    first_order_table: Name | None = None

    @property
    def buckets(self) -> Bucketize | None:
        last = self.transforms[-1] if self.transforms else None
        return last if isinstance(last, Bucketize) else None

    @property
    def is_id(self) -> bool:
        return self.buckets is not None

    @property
    def max_values(self) -> int:
        return 1

    @property
    def pooling(self) -> Pooling:
        return "sum"

    @property
    def oov_id(self) -> int | None:
        return self.missing_id


Feature = Annotated[Categorical | Numeric, Field(discriminator="kind")]


class Table(Strict):
    """An embedding table: `rows` x `dim`, stored in `tables/<name>.safetensors` under the key `weight`.

    An int8 table has a float32 `scale` for each column beside it: value = weight * scale.
    """

    name: Name
    rows: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=1, le=4096)]
    dtype: TableDtype = "float32"

    @property
    def row_bytes(self) -> int:
        return self.dim * {"float32": 4, "int8": 1}.get(self.dtype, 2)

    @property
    def scale_bytes(self) -> int:
        return 4 * self.dim if self.dtype == "int8" else 0

    @property
    def bytes_used(self) -> int:
        return self.rows * self.row_bytes + self.scale_bytes


class FeatureSchema(Strict):
    """All features of a model, in the order of the model's concatenated input, and the tables they read."""

    features: Annotated[tuple[Feature, ...], Field(min_length=1)]
    tables: tuple[Table, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _distinct("features", (f.name for f in self.features))
        _distinct("tables", (t.name for t in self.tables))
        tables = {t.name: t for t in self.tables}
        for f in self.features:
            for key, name in (("table", f.table), ("first_order_table", f.first_order_table)):
                if name is None:
                    continue
                if name not in tables:
                    raise ValueError(f"features.{f.name}.{key}: got {name!r}, expected one of the tables {sorted(tables)}")
                _check_ids_fit(f, key, tables[name])
            first = f.first_order_table
            if first is not None and tables[first].dim != 1:
                raise ValueError(f"features.{f.name}.first_order_table: got dim {tables[first].dim}, expected 1")
        unused = set(tables) - {n for f in self.features for n in (f.table, f.first_order_table)}
        if unused:
            raise ValueError(f"tables: got {sorted(unused)} that no feature reads, expected none")
        return self

    def table(self, name: str) -> Table:
        return self._table_by_name[name]

    def feature(self, name: str) -> Categorical | Numeric:
        return self._feature_by_name[name]

    def pooling(self, feature: str, table: str | None) -> Pooling:
        """How the feature's rows of a table are pooled: as the feature says, or says of its first-order table."""
        f = self.feature(feature)
        if isinstance(f, Categorical) and f.first_order_pooling is not None and table == f.first_order_table:
            return f.first_order_pooling
        return f.pooling

    def columns_read(self, feature: str, table: str | None) -> int:
        """Columns of the feature's rows of a table: its dim, and `max_values` times that for a sequence; without a table
        1 for a number, `max_values` for the mask of a sequence."""
        if table is None:
            return self.feature(feature).max_values
        return self.table(table).dim * (self.feature(feature).max_values if self.pooling(feature, table) == "none" else 1)

    @cached_property
    def _table_by_name(self) -> dict[str, Table]:
        return {t.name: t for t in self.tables}

    @cached_property
    def _feature_by_name(self) -> dict[str, Categorical | Numeric]:
        return {f.name: f for f in self.features}

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Feature name -> its place in a `RowBlock`. Features keep their order within each section."""
        used, out = dict.fromkeys(SECTIONS, 0), {}
        for f in self.features:
            section = section_of(f.scope, f.is_id)
            out[f.name] = Column(section, used[section], f.max_values)
            used[section] += f.max_values
        return out

    @cached_property
    def block_layout(self) -> BlockLayout:
        """Ids as narrow as the largest table of their feature allows; a context's sequences behind its other ids."""
        widths: dict[Section, list[int]] = {section: [] for section in SECTIONS}
        sequences: set[int] = set()
        for f in self.features:
            rows = max((self.table(name).rows for name in (f.table, f.first_order_table) if name is not None), default=0)
            place = self.columns[f.name]
            widths[place.section] += [id_bytes(rows)] * f.max_values
            if place.section == "context_ids" and f.max_values > 1 and f.pooling == "none":
                sequences.update(range(place.start, place.start + place.width))
        context = IdRecord(tuple(widths["context_ids"]), frozenset(sequences))
        candidate = IdRecord(tuple(widths["candidate_ids"]))
        return BlockLayout(context, candidate, len(widths["context_dense"]), len(widths["candidate_dense"]))


def _distinct(where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{where}: got {name!r} twice, expected distinct names")
        seen.add(name)


def _check_ids_fit(f: Categorical | Numeric, key: str, table: Table) -> None:
    """Every id an encoder can give must be a row of the table (a vocabulary's own ids are checked by `bundle`)."""
    where = f"features.{f.name}.{key}"
    if isinstance(f, Numeric) and f.buckets is None:
        if table.rows != 1:
            raise ValueError(f"{where}: got {table.rows} rows, expected 1 for a numeric feature without bucketize")
        return
    highest = {"missing_id": f.missing_id}
    if isinstance(f, Numeric) and f.buckets is not None:
        buckets = len(f.buckets.boundaries) + 1
        _check_first_id(f.buckets.first_id, buckets, where, table)
        highest["the last bucket's id"] = (f.buckets.first_id or 0) + buckets - 1
    if isinstance(f, Categorical):
        highest["oov_id"] = f.oov_id
        if isinstance(f.encoder, Hash):
            _check_first_id(f.encoder.first_id, f.encoder.buckets, where, table)
            highest["the last hash bucket's id"] = (f.encoder.first_id or 0) + f.encoder.buckets - 1
        if f.missing_id == -1 and f.max_values == 1:
            raise ValueError(f"features.{f.name}.missing_id: got -1, expected >= 0 for a feature of one value")
    for what, value in highest.items():
        if value is not None and value >= table.rows:
            raise ValueError(f"{where}: got {table.rows} rows, expected more than {what}, {value}")


def _check_first_id(first_id: int | None, buckets: int, where: str, table: Table) -> None:
    if first_id is None and table.rows != buckets:
        raise ValueError(f"{where}: got {table.rows} rows for {buckets} buckets, expected first_id, the first bucket's id")
