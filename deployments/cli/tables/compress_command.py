"""What `dpiframe compress` does: a bundle in, one of fewer bytes out (fewer rows, other dtypes), and how far scores are off."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from deployments.cli.tables.compression import Changed, Compression
from deployments.offline.encoded_rows import encoded_rows
from deployments.offline.file_scoring import score_file
from deployments.offline.score_job import ScoreJob
from deployments.offline.scored_file import Quality
from dpiframe_core.bundle.bundle import Bundle, read_bundle, write_bundle
from dpiframe_core.bundle.manifest import DensePrecision
from dpiframe_core.embedding.layout import table_dtype
from dpiframe_core.embedding.prune import check_prunable, id_spaces, most_read, prune
from dpiframe_core.embedding.quantize import largest_error, quantize
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import GOLDEN_TOLERANCE
from dpiframe_core.errors import InputError, shown
from dpiframe_core.features.schema import FeatureSchema, Table, TableDtype


@dataclass(frozen=True, slots=True)
class CompressJob:
    """One call of `dpiframe compress`.

    Attributes:
        dtype: of the tables; None: as they are. share: of each table's rows to drop, 0 to 1; None: none.
        only: the tables to change; (): all. Tables whose ids are those of a named one lose the same rows.
        trace: raw rows, whose ids are counted; None: ids are by falling frequency.
        rows, labels: raw rows and a column of 0 and 1 for each task, for metrics.
        separators: feature -> what joins its values in CSV or TSV, in both files.
    """

    bundle: Path
    out: Path
    dtype: TableDtype | None = None
    share: float | None = None
    only: tuple[str, ...] = ()
    trace: Path | None = None
    rows: Path | None = None
    labels: tuple[str, ...] = ()
    separators: Mapping[str, str] = field(default_factory=dict)


def write_compressed(job: CompressJob) -> Compression:
    """Writes the smaller bundle. Its golden rows keep the source's scores, unless rows were dropped: then their ids are
    renumbered, and their scores are those of the pruned tables in their former dtypes.

    Raises:
        InputError: `out` exists, tables that cannot be changed as asked, a bad row of a file.
        BundleError: the bundle is faulty.
    """
    if job.out.exists() or job.out.is_symlink():
        raise InputError("--out", str(job.out), "a path where nothing is yet")
    bundle = read_bundle(job.bundle)
    m, was = bundle.manifest, bundle.manifest.golden.tolerance
    schema = m.feature_schema
    names = [t.name for t in schema.tables]
    for name in job.only:
        if name not in names:
            raise InputError("--only", name, f"one of {shown(names)}")
    chosen = [t for t in schema.tables if t.name in (job.only or names)]
    if job.dtype is not None:
        _check_convertible(chosen, job.dtype)
    pruned, frequencies = (bundle, "") if job.share is None else _pruned(bundle, job, job.share)
    made = pruned if job.dtype is None else _converted(pruned, [t.name for t in chosen], job.dtype)
    changed = _changed(schema, pruned, made)
    source, made_scores = bundle.golden.scores, _scores(made)
    golden = source if job.share is None else _scores(pruned)
    before, after = np.abs(_scores(bundle) - source), np.abs(made_scores - source)
    added = max(0.0, float(np.abs(made_scores - golden).max() - before.max()))
    tolerance = {p: _rounded_up(was.get(p, GOLDEN_TOLERANCE[p]) + added) for p in get_args(DensePrecision)}
    version = "-".join((m.version, *(["pruned"] if job.share else []), *([job.dtype] if job.dtype else [])))
    out = Compression(
        model=m.name, version=version, tables=changed,
        bytes_used=(_bytes(schema), _bytes(made.manifest.feature_schema)),
        frequencies=frequencies, max_before=float(before.max()), max_deviation=float(after.max()),
        mean_deviation=float(after.mean()), tolerance=tolerance, quality=(),
    )  # fmt: skip
    quality = _quality(job.bundle, job)
    note = (
        f"dpiframe compress: of version {m.version} (fingerprint {bundle.fingerprint[:16]}) {out.summary}. Metrics are the "
        f"source model's, from which the scores are off by {out.max_deviation:.3g}; golden scores are "
        f"{'its' if job.share is None else 'those of its pruned tables'}."
    )
    write_bundle(
        job.out,
        name=m.name,
        version=version,
        architecture=m.architecture,
        feature_schema=made.manifest.feature_schema,
        dense=bundle.dense,
        tables=made.tables,
        scales=made.scales,
        vocabularies=made.vocabularies,
        golden=replace(made.golden, scores=golden),
        graph=bundle.graph,
        provenance=m.provenance.model_copy(update={"notes": f"{m.provenance.notes}\n{note}".lstrip()}),
        tasks=m.tasks,
        precision=m.precision,
        golden_tolerance=tolerance,
        example=bundle.example,
    )
    return replace(out, quality=tuple(zip(quality, _quality(job.out, job), strict=True)))


def _changed(schema: FeatureSchema, pruned: Bundle, made: Bundle) -> tuple[Changed, ...]:
    """The tables that are not as they were in the schema. `pruned`: before dtypes changed, with the rows that are left."""
    changed = []
    for old, new in zip(schema.tables, made.manifest.feature_schema.tables, strict=True):
        error, name = 0.0, new.name
        if old.dtype != new.dtype:
            error = largest_error(pruned.tables[name], made.tables[name], made.scales.get(name))
        if not math.isfinite(error):
            raise InputError("--table-dtype", new.dtype, f"a dtype that holds every value of table {name}")
        if old != new:
            changed.append(Changed(old, new, error))
    return tuple(changed)


def _check_convertible(tables: Sequence[Table], dtype: TableDtype) -> None:
    for table in tables:
        if table.dtype == "int8":
            raise InputError(f"tables.{table.name}.dtype", "int8", "float tables; --only names those to convert")
    if all(t.dtype == dtype for t in tables):
        raise InputError("--table-dtype", dtype, "a dtype that some table does not have already")


def _pruned(bundle: Bundle, job: CompressJob, share: float) -> tuple[Bundle, str]:
    """The bundle without the rows that are read least, and where the frequencies came from."""
    schema = bundle.manifest.feature_schema
    spaces = [s for s in id_spaces(schema) if s.to_drop(share) and s.names & {*(job.only or s.names)}]
    try:
        for space in spaces:
            check_prunable(space, counted=job.trace is not None)
    except InputError as error:
        error.add_note("--only names the tables to change")
        raise
    counts, told = None, "not counted; rows in the order of their ids are taken to be by falling frequency"
    if job.trace is not None:
        counts, rows = [np.zeros(s.rows, np.int64) for s in spaces], 0
        for block in encoded_rows(bundle, job.trace, job.separators):
            rows += block.rows
            for space, own in zip(spaces, counts, strict=True):
                space.count(block, schema, own)
        told = f"counted on {rows:,} rows of {job.trace.name}"
    kept = [most_read(s, share, bundle.vocabularies, counts[i] if counts else None) for i, s in enumerate(spaces)]
    kept = [k for k in kept if len(k.ids) < k.space.rows]
    if not kept:
        raise InputError("--prune", share, "a share by which some table loses a row")
    p = prune(schema, kept, bundle.vocabularies, bundle.tables, bundle.golden.block)
    golden = replace(bundle.golden, block=p.block)
    return replace(_of_schema(bundle, p.schema), tables=p.tables, vocabularies=p.vocabularies, golden=golden), told


def _converted(bundle: Bundle, names: Sequence[str], dtype: TableDtype) -> Bundle:
    schema = bundle.manifest.feature_schema
    tables, scales = dict(bundle.tables), dict(bundle.scales)
    for name in names:
        if dtype == "int8":
            tables[name], scales[name] = quantize(tables[name])
        else:
            tables[name] = tables[name].to(table_dtype(dtype))
    listed = tuple(t.model_copy(update={"dtype": dtype}) if t.name in names else t for t in schema.tables)
    return replace(_of_schema(bundle, FeatureSchema(features=schema.features, tables=listed)), tables=tables, scales=scales)


def _of_schema(bundle: Bundle, schema: FeatureSchema) -> Bundle:
    """The bundle as it would be, with a golden tolerance that lets any score pass."""
    golden = bundle.manifest.golden.model_copy(update={"tolerance": {"fp32": 1.0}})
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"feature_schema": schema, "golden": golden}))


def _scores(bundle: Bundle) -> npt.NDArray[np.float32]:
    """Probabilities of the golden rows on the CPU at fp32, to which dense layers add next to no error."""
    engine = Engine(bundle, "cpu", "fp32")
    engine.warmup()
    scores = engine.submit(bundle.golden.block)
    engine.close()
    return scores


def _quality(bundle: Path, job: CompressJob) -> tuple[Quality, ...]:
    """Of each task on the labelled rows, scored as the deviations are."""
    if job.rows is None:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        scoring = ScoreJob(
            bundle, job.rows, Path(folder, "scores.parquet"), (), job.labels, job.separators, device="cpu", precision="fp32"
        )
        return score_file(scoring, lambda done, rows: None).quality


def _bytes(schema: FeatureSchema) -> int:
    return sum(t.bytes_used for t in schema.tables)


def _rounded_up(value: float) -> float:
    """To two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.1e}")
