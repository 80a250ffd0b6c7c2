"""What `dpiframe quantize` does: a bundle in, one with tables of fewer bytes out, and how far its scores are off."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from dpiframe_core.bundle.bundle import Bundle, read_bundle, write_bundle
from dpiframe_core.bundle.manifest import DensePrecision
from dpiframe_core.embedding.layout import table_dtype
from dpiframe_core.embedding.quantize import largest_error, quantize
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import GOLDEN_TOLERANCE
from dpiframe_core.errors import InputError, shown
from dpiframe_core.features.schema import FeatureSchema, Table, TableDtype


@dataclass(frozen=True, slots=True)
class Converted:
    """A table before and after, and the largest difference of a value."""

    old: Table
    new: Table
    error: float


@dataclass(frozen=True, slots=True)
class Quantization:
    """Filled by `write_quantized`. The deviations are those of the golden rows' probabilities from the source model's."""

    model: str
    version: str
    tables: tuple[Converted, ...]
    max_before: float
    max_deviation: float
    mean_deviation: float
    tolerance: dict[DensePrecision, float]

    def report(self) -> str:
        """For people."""
        before, after = (sum(getattr(t, side).bytes_used for t in self.tables) for side in ("old", "new"))
        wide = max(len(t.new.name) for t in self.tables)
        tolerances = ", ".join(f"{precision} {value:.2g}" for precision, value in self.tolerance.items())
        return "\n".join(
            (
                *(f"{t.new.name:{wide}}  {t.old.dtype} -> {t.new.dtype}, off by at most {t.error:.3g}" for t in self.tables),
                f"{self.model} {self.version}: {len(self.tables)} tables from {before / 1e6:,.2f} to {after / 1e6:,.2f} MB",
                f"golden rows, fp32: probabilities off by {self.max_deviation:.3g} at most and {self.mean_deviation:.3g} on "
                f"average; before by {self.max_before:.3g} at most",
                f"golden.tolerance: {tolerances} (what it was, and what the tables add)",
            )
        )


def write_quantized(path: Path, dtype: TableDtype, out: Path, only: Sequence[str] = ()) -> Quantization:
    """Writes to `out` the bundle at `path` with its tables, or `only` those named, in `dtype`. Golden rows stay as they are.

    Raises:
        InputError: `out` exists, or tables that cannot be converted (unknown, int8 already, values that do not fit).
        BundleError: the bundle is faulty.
    """
    if out.exists() or out.is_symlink():
        raise InputError("--out", str(out), "a path where nothing is yet")
    bundle = read_bundle(path)
    m, was = bundle.manifest, bundle.manifest.golden.tolerance
    chosen = _chosen(m.feature_schema.tables, dtype, only)
    made, converted = _converted(bundle, chosen, dtype)
    before, after = _deviations(bundle), _deviations(made)
    added = max(0.0, float(after.max() - before.max()))
    tolerance = {p: _rounded_up(was.get(p, GOLDEN_TOLERANCE[p]) + added) for p in get_args(DensePrecision)}
    note = (
        f"dpiframe quantize: {len(chosen)} of {len(m.feature_schema.tables)} tables of version {m.version} (fingerprint "
        f"{bundle.fingerprint[:16]}) to {dtype}. Metrics and golden scores are the source model's, from which the scores are "
        f"off by {after.max():.3g}."
    )
    version = f"{m.version}-{dtype}"
    write_bundle(
        out,
        name=m.name,
        version=version,
        architecture=m.architecture,
        feature_schema=made.manifest.feature_schema,
        dense=bundle.dense,
        tables=made.tables,
        scales=made.scales,
        vocabularies=bundle.vocabularies,
        golden=bundle.golden,
        graph=bundle.graph,
        provenance=m.provenance.model_copy(update={"notes": f"{m.provenance.notes}\n{note}".lstrip()}),
        tasks=m.tasks,
        precision=m.precision,
        golden_tolerance=tolerance,
        example=bundle.example,
    )
    return Quantization(
        m.name, version, converted, float(before.max()), float(after.max()), float(after.mean()), tolerance
    )  # fmt: skip


def _chosen(tables: Sequence[Table], dtype: TableDtype, only: Sequence[str]) -> list[Table]:
    names = [t.name for t in tables]
    for name in only:
        if name not in names:
            raise InputError("--only", name, f"one of {shown(names)}")
    chosen = [t for t in tables if t.name in (only or names)]
    for table in chosen:
        if table.dtype == "int8":
            raise InputError(f"tables.{table.name}.dtype", "int8", "float tables; --only names those to convert")
    changing = [t for t in chosen if t.dtype != dtype]
    if not changing:
        raise InputError("--tables", dtype, "a dtype that some table does not have already")
    return changing


def _converted(bundle: Bundle, chosen: Sequence[Table], dtype: TableDtype) -> tuple[Bundle, tuple[Converted, ...]]:
    """The bundle as it would be, with a golden tolerance that lets any score pass."""
    tables, scales, done = dict(bundle.tables), dict(bundle.scales), {}
    for old in chosen:
        weight, scale = tables[old.name], None
        if dtype == "int8":
            tables[old.name], scale = quantize(weight)
            scales[old.name] = scale
        else:
            tables[old.name] = weight.to(table_dtype(dtype))
        new = Table(name=old.name, rows=old.rows, dim=old.dim, dtype=dtype)
        done[old.name] = Converted(old, new, largest_error(weight, tables[old.name], scale))
        if not math.isfinite(done[old.name].error):
            raise InputError("--tables", dtype, f"a dtype that holds every value of table {old.name}")
    m = bundle.manifest
    schema = m.feature_schema
    listed = tuple(done[t.name].new if t.name in done else t for t in schema.tables)
    golden = m.golden.model_copy(update={"tolerance": {"fp32": 1.0}})
    manifest = m.model_copy(update={"feature_schema": FeatureSchema(features=schema.features, tables=listed), "golden": golden})
    return replace(bundle, manifest=manifest, tables=tables, scales=scales), tuple(done.values())


def _deviations(bundle: Bundle) -> npt.NDArray[np.float32]:
    """|probability - golden score| on the CPU at fp32, where dense layers add next to nothing."""
    engine = Engine(bundle, "cpu", "fp32")
    engine.warmup()
    off: npt.NDArray[np.float32] = np.abs(engine.submit(bundle.golden.block) - bundle.golden.scores)
    engine.close()
    return off


def _rounded_up(value: float) -> float:
    """To two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.1e}")
