"""Writes a source model as a bundle, with golden rows, and says how near the bundle's scores are to the source's.

The deviation is measured on what was written and read back, by the CPU's operators at fp32, and stored with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dpiframe_core.bundle.bundle import Golden, GoldenSpec, Manifest, Provenance, is_taken, read_bundle, write_bundle
from dpiframe_core.bundle.bundle_files import move_into_place, new_folder
from dpiframe_core.bundle.manifest import MANIFEST_FILE, manifest_yaml
from dpiframe_core.compiler.cpu_scores import cpu_scores
from dpiframe_core.errors import BundleError, InputError
from dpiframe_core.evaluation.parity import Parity, parity
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import Floats, RowBlock
from dpiframe_core.features.vocabulary import check_vocabularies
from dpiframe_core.importers.raw_rows import Columns, entries_named, random_rows, read_expected, read_rows
from dpiframe_core.importers.source_model import SourceModel
from dpiframe_core.models.model_graph import model_graph

Progress: TypeAlias = Callable[[str, int, int], None]
TOLERANCE = 1e-5  # on the probability, at float32, for every supported model and option
_GOLDEN_ROWS, _EXAMPLE_ROWS, _PART = 64, 5, 1024


@dataclass(slots=True)
class _TableProgress:
    """Counts the bytes of the tables that are written, for `tell`."""

    tell: Progress
    total: int
    done: int = 0

    def now(self, what: str) -> None:
        self.tell(what, self.done, self.total)

    def wrote(self, table: str, nbytes: int) -> None:
        self.done += nbytes
        self.now(f"Writing {table}")


@dataclass(frozen=True, slots=True)
class Imported:
    """Filled by `write_import`. For people: `against`, what the scores were compared with; `taken`, a line of defaults."""

    manifest: Manifest
    parity: Parity
    against: str
    taken: str = ""

    def report(self) -> str:
        m = self.manifest
        return (
            f"{m.name} {m.version}: {m.architecture.type}, {len(m.feature_schema.features)} features, "
            f"{len(m.feature_schema.tables)} tables\n{self.parity.report()}\nagainst {self.against}{self.taken}"
        )


def write_import(
    source: SourceModel,
    out: str | Path,
    *,
    name: str | None = None,
    version: str = "1",
    rows: str | Path | None = None,
    expected: str | Path | None = None,
    label: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Writes the bundle at `out`, unless its scores are off by more than 1e-5.

    Args:
        rows: raw rows to compare on, as for `score`; random ones by default. expected: the source's own scores on them (CSV);
            by default the source's layers are computed in float64. label: the column of clicks in `rows`, for AUC and log-loss.
        progress: told what is being done, and the bytes of tables written, of how many.

    Raises:
        InputError: a file does not fit, or the scores are off. BundleError: `out` is taken, or cannot be written.
    """
    out, rows = Path(out), None if rows is None else Path(rows)
    expected = None if expected is None else Path(expected)
    if expected is not None and rows is None:
        raise InputError("--expected", str(expected), "raw rows too: --golden-rows FILE")
    if is_taken(out, overwrite):  # before any work: as `write_bundle` would
        raise BundleError(f"{out}: got an existing path, expected a new one, or a bundle and --overwrite")
    schema = source.schema
    if rows is None:
        columns, labels = random_rows(schema, source.vocabularies, _GOLDEN_ROWS), None
    else:
        columns, labels = read_rows(rows, schema, label or source.label)
        if label is not None and labels is None:
            raise InputError(f"{rows}: {label}", "no such column, or other values", "labels of 0 and 1")
    told = _TableProgress(progress or (lambda what, done, total: None), sum(t.bytes_used for t in schema.tables))
    told.now("Checking the vocabularies")
    check_vocabularies(schema, source.vocabularies)
    told.now("Scoring by the source")
    block = Encoder(schema, entries_named(schema, source.vocabularies, columns)).encode(columns)
    if expected is None:
        own = np.concatenate([source.reference(part) for part in _parts(block)])
        computed = f"the layers of {source.library}'s {source.model} computed in float64"
        against = f"{source.library}'s {source.model} itself" if source.own else computed
    else:
        if len(source.tasks) > 1:
            raise InputError("--expected", str(expected), "none, as the model has several tasks")
        own, against = read_expected(expected, block.rows)[:, None], f"{source.library}'s own scores, {expected.name}"
    against += f", on {'random rows' if rows is None else rows.name}"
    with new_folder(out.absolute()) as folder:
        staging = folder / out.name
        manifest = _write(source, staging, name or source.model.lower(), version, columns, block, own, told.wrote)
        told.now("Comparing")
        made = parity(own.ravel(), written_scores(staging, block).ravel(), labels if own.shape[1] == 1 else None)
        made = replace(made, rows=len(own))  # of several tasks each has several scores
        if not made.max_deviation <= TOLERANCE:
            taken = (
                f" (the configuration does not name {source.taken}: taken as the library's class has it)"
                if source.taken
                else ""
            )
            raise InputError(
                "parity", f"|dp| up to {made.max_deviation:.3g} against {against}", f"at most {TOLERANCE:g}{taken}"
            )
        provenance = manifest.provenance.model_copy(update={"metrics": made.metrics(), "notes": f"compared with {against}"})
        manifest = manifest.model_copy(update={"provenance": provenance, "golden": GoldenSpec(rows=manifest.golden.rows)})
        (staging / MANIFEST_FILE).write_bytes(manifest_yaml(manifest))
        move_into_place(staging, out.absolute())
    return Imported(manifest, made, against, source.taken_line)


def written_scores(path: Path, block: RowBlock) -> Floats:
    """float32[rows, tasks] of the bundle at `path`, read back.

    Raises:
        BundleError: it cannot be read.
    """
    bundle = read_bundle(path, keep_vocabularies=False)
    return cpu_scores(model_graph(bundle), bundle.manifest.feature_schema, bundle.tables, bundle.dense, block, bundle.scales)


def _write(
    source: SourceModel, path: Path, name: str, version: str, columns: Columns, block: RowBlock, scores: npt.NDArray[Any],
    wrote: Callable[[str, int], None],
) -> Manifest:  # fmt: skip
    """The bundle at `path` with the first rows as golden ones, which the engine does not refuse: what is off is reported."""
    kept = block.part(0, min(_GOLDEN_ROWS, block.rows))
    golden = Golden(kept, scores[: kept.rows].astype(np.float32))
    provenance = Provenance(source=f"{source.library} {source.model}", created=datetime.now(UTC).isoformat(timespec="seconds"))
    return write_bundle(
        path, name=name, version=version, architecture=source.architecture, feature_schema=source.schema,
        dense=source.dense, tables=source.tables, vocabularies=source.vocabularies, golden=golden, provenance=provenance,
        example=_example(source, columns), graph=source.graph, tasks=source.tasks, golden_tolerance={"fp32": 1.0},
        wrote=wrote,
    )  # fmt: skip


def _parts(block: RowBlock) -> list[RowBlock]:
    return [block.part(i, min(i + _PART, block.rows)) for i in range(0, block.rows, _PART)]


def _example(source: SourceModel, columns: Columns) -> dict[str, Any]:
    context = {f.name for f in source.schema.features if f.scope == "context"}
    return {
        "context": {name: values[0] for name, values in columns.items() if name in context},
        "candidates": {name: values[:_EXAMPLE_ROWS] for name, values in columns.items() if name not in context},
    }
