"""What is to be scored offline, held against the bundle and the input's columns before any work begins. Plain data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from deployments.offline.output_file import check_outfile
from dpiframe_core.bundle.manifest import Manifest
from dpiframe_core.errors import InputError, shown
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.files.row_files import RowFile, column_names
from dpiframe_core.files.table_rows import column_types, missing_features, splitters

Progress = Callable[[float | None, int], None]  # told which part of the input is done (0 to 1, if known) and how many rows


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """One call of `dpiframe score`.

    Attributes:
        out: the Parquet file to write. keep: the input's columns to write there beside the scores; None: all.
        labels: a column of 0 and 1 for each task, in their order, or () for no metrics.
        separators: feature -> what joins its values in CSV or TSV, in place of the schema's splitter.
        encoded: a Parquet input holds ids and transformed numbers in place of raw values.
        device, precision: as everywhere. chunk_rows: rows that are read, scored and written at a time.
    """

    bundle: Path
    input: Path
    out: Path
    keep: tuple[str, ...] | None = None
    labels: tuple[str, ...] = ()
    separators: Mapping[str, str] = field(default_factory=dict)
    encoded: bool = False
    device: str = "auto"
    precision: str | None = None
    chunk_rows: int = 8192


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """A job that may run. Filled by `plan_job`.

    Attributes:
        file: what to read, with no more columns than are needed. kept: the input's columns in the output, in their order.
        scores: the names of the columns of scores, one a task. labels: as in the job.
    """

    file: RowFile
    kept: tuple[str, ...]
    scores: tuple[str, ...]
    labels: tuple[str, ...]


def plan_job(job: ScoreJob, manifest: Manifest) -> ScorePlan:
    """Checks everything that can be told before the first row.

    Raises:
        InputError: a file that cannot be read or written, a column that lacks or whose name is taken, an option that does
            not fit the model or the file.
    """
    schema, tasks = manifest.feature_schema, manifest.tasks
    whole, found = input_file(job.input, schema, job.separators, job.labels)
    check_outfile("--out", job.out, ".parquet")
    if job.out.exists() and job.out.samefile(job.input):
        raise InputError("--out", str(job.out), "another file than the input")
    if job.encoded and not whole.is_parquet:
        raise InputError("--encoded", str(job.input), "a Parquet file")
    if job.labels and len(job.labels) != len(tasks):
        raise InputError("--label", shown(list(job.labels)), f"one column for each task: {', '.join(tasks)}")
    for option, wanted in (("--keep", job.keep or ()), ("--label", job.labels)):
        for name in wanted:
            if name not in found:
                raise InputError(option, name, f"one of the input's columns, {shown(found)}")
    kept = tuple(n for n in found if job.keep is None or n in job.keep)
    scores = ("score",) if len(tasks) == 1 else tuple(f"score_{task}" for task in tasks)
    if taken := sorted({*kept} & {*scores}):
        raise InputError(f"{job.input}, columns", taken, "none of these names, which the scores get; --keep others")
    needed = {*kept, *job.labels, *(f.name for f in schema.features)}
    return ScorePlan(replace(whole, columns=tuple(n for n in found if n in needed)), kept, scores, job.labels)


def input_file(
    path: Path, schema: FeatureSchema, separators: Mapping[str, str], labels: Sequence[str] = ()
) -> tuple[RowFile, list[str]]:
    """A file that has a column for every feature, and the names of all its columns.

    Raises:
        InputError: it cannot be read, a column lacks, or separators do not fit.
    """
    joined_by = splitters(schema) | dict(separators)
    file = RowFile(path, column_types(schema) | dict.fromkeys(labels, pa.int64()), joined_by)
    text = path.suffix.lower() in (".csv", ".tsv")
    lists = [f.name for f in schema.features if f.max_values > 1]
    for name in separators:
        if not text or name not in lists:
            raise InputError("--splitter", name, "a feature of several values, and a CSV or TSV file")
    if text and (unsplit := [name for name in lists if name not in joined_by]):
        raise InputError.worded(
            "--splitter", "nothing", f"FEATURE=SEPARATOR for the features of several values, {', '.join(unsplit)}"
        )
    found = column_names(file)
    if lacking := missing_features(schema, found):
        raise InputError(f"{path}, columns", found, f"columns for the features {', '.join(lacking)} too")
    return file, found
