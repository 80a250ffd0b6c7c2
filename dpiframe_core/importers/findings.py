"""What an importer found, in text, before anything is written: the model, its features, vocabularies, tables and parameters."""

from collections.abc import Sequence

from dpiframe_core.features.schema import Categorical, Feature, Numeric
from dpiframe_core.features.vocabulary import vocabulary_name
from dpiframe_core.importers.source_model import SourceModel


def findings(source: SourceModel) -> str:
    """A page for people. The importers have matched every parameter of the checkpoint before there is a source model."""
    schema = source.schema
    dense = sum(p.numel() for p in source.dense.values())
    size = sum(t.bytes_used for t in schema.tables)
    tables = [(t.name, f"{t.rows:,} x {t.dim}", f"{t.bytes_used / 2**20:,.1f} MiB") for t in schema.tables]
    features = [_feature(source, f) for f in schema.features]
    parameters = [(name, " x ".join(map(str, p.shape)) or "1") for name, p in source.dense.items()]
    return "\n\n".join(
        (
            f"{source.library} {source.model}: {source.architecture.type}, tasks {', '.join(source.tasks)}{source.taken_line}",
            f"{len(features)} features\n" + _columns([("feature", "scope", "values", "table", "null", "unknown"), *features]),
            f"{len(tables)} tables, {size / 2**20:,.1f} MiB\n" + _columns([("table", "rows x dim", "float32"), *tables]),
            f"{len(parameters)} dense parameters, {dense:,} numbers; every parameter of the checkpoint has its place\n"
            + _columns([("parameter", "shape"), *parameters]),
        )
    )


def _feature(source: SourceModel, f: Feature) -> tuple[str, ...]:
    table = " + ".join(name for name in (f.table, f.first_order_table) if name is not None)
    if isinstance(f, Numeric):
        how = " ".join(["number", *(t.type for t in f.transforms)])
        null = f.missing_value if f.buckets is None else f.missing_id
        return f.name, f.scope, how, table, "refused" if null is None else f"{null:.6g}", ""
    return f.name, f.scope, _values(source, f), table, *(_row(f, row) for row in (f.missing_id, f.oov_id))


def _values(source: SourceModel, f: Categorical) -> str:
    name = vocabulary_name(f)
    kind, how = "text" if f.values == "string" else "integers", "each" if f.pooling == "none" else f.pooling
    known = f", {len(source.vocabularies[name].table):,} known" if name is not None else f", {f.encoder.type}"
    return kind + known + (f", up to {f.max_values}, {how}" if f.max_values > 1 else "")


def _row(f: Categorical, row: int | None) -> str:
    return "refused" if row is None else "nothing" if row < 0 else f"row {row}"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, width)).rstrip() for row in rows)
