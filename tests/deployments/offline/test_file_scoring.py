"""`dpiframe score`: files in, the same rows with their scores out, or one line that says why not and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deployments.offline import chunk_scorer, file_scoring, scored_file
from deployments.offline.file_scoring import score_file
from deployments.offline.ray_scoring import Piece, pieces, score_on_cluster
from deployments.offline.score_job import ScoreJob, plan_job
from deployments.offline.scored_file import ScoreReport
from dpiframe_core.bundle.bundle import Bundle, write_bundle
from dpiframe_core.bundle.manifest import manifest_yaml, parse_manifest
from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.files.row_files import RowFile
from dpiframe_core.graph.architecture import DCNv2, DeepFM
from tests.deployments.command import dpiframe_here
from tests.docs.test_readme import ROOT, RUN, blocks
from tests.runner import small_bundle

pytestmark = pytest.mark.bulk

DPIFRAME = str(Path(sys.executable).with_name("dpiframe"))
SMALL_PIECES = [  # and tasks that read pieces import no torch
    sys.executable, "-c", "import sys; from deployments.offline import ray_scoring; assert 'torch' not in sys.modules;"
    "ray_scoring._PIECE_ROWS = 20_000; from deployments.cli.main import app; app()",
]  # fmt: skip
ROWS = 500


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """c0 .. c4 (ids; two of the context), bag0 and bag1 (hashed texts), n0 and n1 (numbers)."""
    made: Bundle = small_bundle(tmp_path_factory.mktemp("bundles") / "small", DeepFM(hidden_units=(16, 8)), bags=2)
    return made


def columns(rows: int = ROWS, seed: int = 0) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    out: dict[str, list[Any]] = {"label": rng.integers(0, 2, rows).tolist(), "request": [f"r{i // 5}" for i in range(rows)]}
    for i in range(5):
        out[f"c{i}"] = [None if rng.random() < 0.1 else int(v) for v in rng.integers(0, 3 + 7 * i, rows)]
    for i in range(2):
        out[f"bag{i}"] = [[f"t{v}" for v in rng.integers(0, 50, n)] or None for n in rng.integers(0, 5, rows)]
        out[f"n{i}"] = [None if rng.random() < 0.1 else round(float(v), 3) for v in rng.standard_normal(rows)]
    return out


FEATURES = ("c0", "c1", "c2", "c3", "c4", "bag0", "bag1", "n0", "n1")
SPLIT = {"bag0": "|", "bag1": "^"}


def write(path: Path, values: dict[str, list[Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(values), path, row_group_size=150)
    elif path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps(dict(zip(values, r, strict=True))) + "\n" for r in zip(*values.values(), strict=True))
        )
    else:
        sep = "\t" if path.suffix == ".tsv" else ","

        def cell(name: str, v: Any) -> str:
            return "" if v is None else SPLIT[name].join(v) if isinstance(v, list) else str(v)

        lines = [sep.join(values), *(sep.join(map(cell, values, r)) for r in zip(*values.values(), strict=True))]
        path.write_text("\n".join(lines) + "\n")
    return path


def job_of(bundle: Bundle, path: Path, **options: Any) -> ScoreJob:
    text = path.suffix in (".csv", ".tsv")
    plain = ScoreJob(bundle.path, path, path.with_name("out.parquet"), separators=SPLIT if text else {}, device="cpu")
    return replace(plain, **({"chunk_rows": 64} | options))


def run(job: ScoreJob, threads: int = 2) -> tuple[ScoreReport, pa.Table]:
    report = score_file(job, lambda done, rows: None, threads)
    return report, pq.read_table(job.out)


def wanted(bundle: Bundle, values: dict[str, list[Any]]) -> np.ndarray:
    """The scores of requests of ten rows, through the engine as the service calls it."""
    engine = Engine(bundle, "cpu")
    engine.warmup()
    rows = len(values["c0"])
    own = {name: values[name] for name in FEATURES}
    parts = [engine.score({n: v[i : i + 10] for n, v in own.items()}) for i in range(0, rows, 10)]
    engine.close()
    return np.concatenate(parts)[:, 0]


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "jsonl"])
def test_every_format_gets_the_scores_of_the_service_beside_all_its_columns(
    bundle: Bundle, tmp_path: Path, ending: str
) -> None:
    values = columns()
    report, got = run(job_of(bundle, write(tmp_path / f"in.{ending}", values)))
    np.testing.assert_allclose(got["score"].to_numpy(), wanted(bundle, values), rtol=0, atol=1e-6)
    assert got.column_names == [*values, "score"]
    assert got.schema.field("score").type == pa.float32()
    assert got["request"].to_pylist() == values["request"]
    assert got["bag1"].to_pylist() == values["bag1"]
    assert got["n0"].to_pylist() == values["n0"]
    assert (report.rows, report.quality) == (ROWS, ())
    assert report.text().startswith(f"{tmp_path}/out.parquet: 500 rows in ")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"in.{ending}", "out.parquet"]


def test_encoded_ids_get_the_scores_of_the_values_that_they_stand_for(bundle: Bundle, tmp_path: Path) -> None:
    values = columns()
    engine = Engine(bundle, "cpu")
    block = engine.encoder.encode({name: values[name] for name in FEATURES})
    ids: dict[str, Any] = {}
    for f in bundle.manifest.feature_schema.features:
        column = block.column(bundle.manifest.feature_schema.columns[f.name])
        rows = np.where(column == np.array(-1).astype(column.dtype), -1, column.astype(np.int64)) if f.is_id else column
        ids[f.name] = rows.tolist() if f.max_values > 1 else rows[:, 0].tolist()
    _, raw = run(job_of(bundle, write(tmp_path / "raw.parquet", values)))
    _, got = run(job_of(bundle, write(tmp_path / "ids.parquet", ids), encoded=True))
    assert got["score"].equals(raw["score"])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk_rows", [7, 500, 4096])
def test_neither_threads_nor_chunks_change_a_row_or_its_place(
    bundle: Bundle, tmp_path: Path, threads: int, chunk_rows: int
) -> None:
    values = columns()
    _, got = run(job_of(bundle, write(tmp_path / "in.csv", values), chunk_rows=chunk_rows), threads)
    np.testing.assert_allclose(got["score"].to_numpy(), wanted(bundle, values), rtol=0, atol=1e-6)
    assert got["c4"].to_pylist() == values["c4"]


def test_metrics_are_those_of_all_rows(bundle: Bundle, tmp_path: Path) -> None:
    values = columns()
    values["c0"] = [0, 2] * (ROWS // 2)
    job = job_of(bundle, write(tmp_path / "in.csv", values), labels=("label",), keep=("request",))
    report, got = run(job)
    assert got.column_names == ["request", "score"]
    p, y = got["score"].to_numpy().astype(np.float64), np.array(values["label"])
    pairs = p[y == 1][:, None] - p[y == 0][None]
    (quality,) = report.quality
    assert quality.auc == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-12)
    assert quality.log_loss == pytest.approx(-np.where(y == 1, np.log(p), np.log(1 - p)).mean(), abs=1e-12)
    assert report.text().splitlines()[-1] == f"score: AUC {quality.auc:.6f}, log-loss {quality.log_loss:.6f}"
    values["label"] = [1] * ROWS
    report, _ = run(job_of(bundle, write(tmp_path / "ones.csv", values), labels=("label",)))
    assert "score: AUC none, as all labels are alike, log-loss 0." in report.text()


def test_a_model_of_two_tasks_gets_a_column_and_metrics_for_each(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "one", DCNv2(cross_layers=1, hidden_units=(16, 8)), bags=2, first_order=False)
    m = bundle.manifest
    twice = {k: v.repeat(2, *[1] * (v.ndim - 1)) if k.startswith("head") else v for k, v in bundle.dense.items()}
    twice["head.bias"][1] += 1
    golden = replace(bundle.golden, scores=np.repeat(bundle.golden.scores, 2, 1))
    z = np.log(golden.scores / (1 - golden.scores)) + np.array([0, 1], np.float32)
    golden = replace(golden, scores=(1 / (1 + np.exp(-z))).astype(np.float32))
    write_bundle(
        tmp_path / "two", name="two", version="1", architecture=m.architecture, feature_schema=m.feature_schema, dense=twice,
        tables=bundle.tables, vocabularies={}, golden=golden, provenance=m.provenance, tasks=("click", "buy"),
    )  # fmt: skip
    values = columns() | {"bought": [0, 1] * (ROWS // 2)}
    job = replace(job_of(bundle, write(tmp_path / "in.parquet", values)), bundle=tmp_path / "two", labels=("label", "bought"))
    report, got = run(job)
    assert got.column_names[-2:] == ["score_click", "score_buy"]
    click, buy = (got[f"score_{task}"].to_numpy() for task in ("click", "buy"))
    np.testing.assert_allclose(click, wanted(bundle, values), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.log(buy / (1 - buy)), np.log(click / (1 - click)) + 1, rtol=0, atol=1e-4)
    assert [q.score for q in report.quality] == ["score_click", "score_buy"]
    with pytest.raises(InputError, match=r"--label: got \"\['label'\]\", expected one column for each task: click, buy"):
        run(replace(job, labels=("label",)))


FAULTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("csv", {"c3": None, "n1": None}, {}, "in.csv, columns: got .*, expected columns for the features c3, n1 too"),
    (
        "csv",
        {},
        {"separators": {}},
        "--splitter: got nothing, expected FEATURE=SEPARATOR for the features of several values, bag0",
    ),
    ("csv", {}, {"separators": SPLIT | {"c0": "|"}}, "--splitter: got 'c0', expected a feature of several values, and a CSV"),
    ("parquet", {}, {"separators": SPLIT}, "--splitter: got 'bag0', expected a feature of several values, and a CSV"),
    ("csv", {}, {"labels": ("clicked",)}, "--label: got 'clicked', expected one of the input's columns"),
    ("csv", {}, {"keep": ("nothing",)}, "--keep: got 'nothing', expected one of the input's columns"),
    ("csv", {"score": [1] * ROWS}, {}, r"in.csv, columns: got \['score'\], expected none of these names, which the scores get"),
    ("csv", {}, {"encoded": True}, "--encoded: got '.*in.csv', expected a Parquet file"),
    ("csv", {}, {"device": "tpu"}, "device: got 'tpu', expected auto, cpu, cuda or cuda:N"),
    ("csv", {"c2": [*[0] * 333, 99, *[0] * 166]}, {}, "in.csv, row 334, column c2: got 99, expected an id from 0 to 16"),
    ("csv", {"c2": [*[0] * 333, "x", *[0] * 166]}, {}, "in.csv, row 334, column c2: got 'x', expected a 64-bit integer"),
    ("jsonl", {"n0": [*[0.5] * 450, "1", *[0.5] * 49]}, {}, "in.jsonl, row 451, column n0: got '1', expected a number"),
    (
        "parquet",
        {"n0": [*[0.5] * 450, float("nan"), *[0.5] * 49]},
        {},
        "in.parquet, row 451, column n0: got nan, expected",
    ),
    ("csv", {"label": [*[0] * 70, 2, *[0] * 429]}, {"labels": ("label",)}, "row 71, column label: got 2, expected 0 or 1"),
    (
        "csv",
        {"label": [*[0] * 70, None, *[0] * 429]},
        {"labels": ("label",)},
        "row 71, column label: got null, expected 0",
    ),
]


@pytest.mark.parametrize(("ending", "empty"), [("csv", "c2"), ("parquet", "bag0"), ("jsonl", "n1")])
def test_an_empty_cell_is_named_by_its_row_where_the_schema_does_not_say_what_it_means(
    bundle: Bundle, tmp_path: Path, ending: str, empty: str
) -> None:
    strict = tmp_path / "strict"
    shutil.copytree(bundle.path, strict)
    manifest = parse_manifest((strict / "model.yaml").read_bytes())
    silent = {"missing_id": None} if empty != "n1" else {"missing_value": None}
    schema = manifest.feature_schema
    features = tuple(f.model_copy(update=silent) if f.name == empty else f for f in schema.features)
    changed = schema.model_copy(update={"features": features})
    (strict / "model.yaml").write_bytes(manifest_yaml(manifest.model_copy(update={"feature_schema": changed})))
    full: dict[str, list[Any]] = {name: [v or (["t1"] if "bag" in name else 0) for v in c] for name, c in columns().items()}
    job = job_of(bundle, write(tmp_path / f"whole.{ending}", full))
    run(replace(job, bundle=strict))
    full[empty][333] = None
    job = replace(job_of(bundle, write(tmp_path / f"in.{ending}", full)), bundle=strict, out=tmp_path / "other.parquet")
    with pytest.raises(InputError, match=f"in.{ending}, row 334, column {empty}: got null, expected .* as the schema"):
        run(job)
    assert not (tmp_path / "other.parquet").exists()


@pytest.mark.parametrize(("ending", "changed", "options", "message"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)])
def test_what_cannot_be_scored_is_named_and_nothing_is_left(
    bundle: Bundle, tmp_path: Path, ending: str, changed: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    values = {k: v for k, v in (columns() | changed).items() if v is not None}
    path = write(tmp_path / f"in.{ending}", values)
    (tmp_path / "out.parquet").write_text("from before")
    with pytest.raises(InputError, match=message):
        score_file(job_of(bundle, path, **options), lambda done, rows: None, 2)
    assert (tmp_path / "out.parquet").read_text() == "from before"
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, "out.parquet"]


def test_a_column_that_parquet_cannot_hold_is_told(bundle: Bundle, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", columns(10) | {"extra": [{}] * 10})
    with pytest.raises(InputError, match=r"--out: got .*, expected a file that may be written \(.*struct.*\)"):
        run(job_of(bundle, path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("name", ["__row", "__oov", "__score_0", "__label_1"])
def test_the_ray_engine_refuses_columns_named_as_its_own(bundle: Bundle, tmp_path: Path, name: str) -> None:
    job = job_of(bundle, write(tmp_path / "in.parquet", columns(10) | {name: [1] * 10}))
    with pytest.raises(
        InputError, match=rf"in.parquet, columns: got \['{name}'\], expected none of these names, which the ray"
    ):
        score_on_cluster(job, lambda done, rows: None, 1)
    assert plan_job(replace(job, keep=("label",)), bundle.manifest).file.columns == ("label", *sorted_features(job.input))


def sorted_features(path: Path) -> list[str]:
    return [n for n in pq.read_schema(path).names if n in FEATURES]


def test_values_are_joined_as_the_schema_says_unless_the_job_says_otherwise(bundle: Bundle, tmp_path: Path) -> None:
    schema = bundle.manifest.feature_schema
    features = [f.model_copy(update={"splitter": "|"}) if f.max_values > 1 else f for f in schema.features]
    manifest = bundle.manifest.model_copy(
        update={"feature_schema": FeatureSchema(features=tuple(features), tables=schema.tables)}
    )
    job = job_of(bundle, write(tmp_path / "in.csv", columns(10)))
    assert plan_job(replace(job, separators={}), manifest).file.separators == {"bag0": "|", "bag1": "|"}
    assert plan_job(replace(job, separators={"bag1": "^"}), manifest).file.separators == SPLIT


def test_outputs_that_cannot_be_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", columns(10))
    for out, message in (
        (tmp_path / "out.csv", "--out: got '.*out.csv', expected a name that ends in .parquet"),
        (tmp_path / "no" / "out.parquet", "--out: got .*, expected a file in a folder that exists"),
        (path, "--out: got '.*in.parquet', expected another file than the input"),
    ):
        with pytest.raises(InputError, match=message):
            score_file(job_of(bundle, path, out=out), lambda done, rows: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.parquet"]


def test_few_chunks_are_alive_at_a_time_and_memory_does_not_grow_with_the_file(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that were begun and not yet written, and the most bytes that Python and Arrow hold, at 1 and 8 times the rows."""
    alive: list[int] = []
    begun: list[int] = []
    scored = chunk_scorer.ChunkScorer.__call__

    def counted(self: Any, *arguments: Any) -> Any:
        begun.append(1)
        return scored(self, *arguments)

    monkeypatch.setattr(file_scoring.ChunkScorer, "__call__", counted)
    monkeypatch.setattr(scored_file, "_ROW_GROUP", 2000)
    peaks = [_peak_bytes(bundle, tmp_path, rows, alive, begun) for rows in (20_000, 160_000)]
    assert max(alive) <= 4
    assert peaks[1] < 3 * peaks[0]  # one to four chunks are alive at the peak; all of them would be 8 times


def _peak_bytes(bundle: Bundle, folder: Path, rows: int, alive: list[int], begun: list[int]) -> int:
    path = folder / f"{rows}.parquet"
    pq.write_table(pa.table(columns(2000)).take(pa.array(np.arange(rows) % 2000)), path, row_group_size=10_000)
    before, arrow, start = pa.total_allocated_bytes(), [0], len(begun)

    def progress(done: float | None, written: int) -> None:
        alive.append(len(begun) - start - written // 500)
        arrow.append(pa.total_allocated_bytes() - before)

    tracemalloc.start()
    score_file(job_of(bundle, path, chunk_rows=500), progress, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(arrow) == 1 + rows // 500
    return peak + max(arrow)


def test_an_interrupted_run_leaves_what_was_there_before(bundle: Bundle, tmp_path: Path) -> None:
    """Half a million rows take seconds; SIGTERM comes when the unfinished file is there."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table(columns(1000)).take(pa.array(np.arange(600_000) % 1000)), path)
    (tmp_path / "out.parquet").write_text("from before")
    command = [DPIFRAME, "score", str(bundle.path), "in.parquet", "-o", "out.parquet", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".out.parquet.*.part")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")
    assert sorted(os.listdir(tmp_path)) == ["in.parquet", "out.parquet"]
    assert (tmp_path / "out.parquet").read_text() == "from before"


def test_the_command_prints_rows_rate_and_metrics(bundle: Bundle, tmp_path: Path) -> None:
    write(tmp_path / "in.csv", columns())
    command = ["score", str(bundle.path), "in.csv", "-o", "out.parquet", "--device", "cpu", "--label", "label",
               "--splitter", "bag0=|", "--splitter", "bag1=^", "--keep", "request", "--keep", "label"]  # fmt: skip
    done = dpiframe_here(*command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith("out.parquet: 500 rows in ")
    assert first.endswith(" rows/s")
    assert second.startswith("score: AUC 0.")
    assert pq.read_table(tmp_path / "out.parquet").column_names == ["label", "request", "score"]
    done = dpiframe_here(*command, "--label", "x", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "error: --label: got \"['label', 'x']\", expected one column for each task: click\n",
    )
    for wrong in (["--splitter", "bag0"], ["--workers", "2"], ["--engine", "spark"]):
        done = dpiframe_here(*command, *wrong, cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_the_documents_command_runs(bundle: Bundle, tmp_path: Path) -> None:
    (block,) = (b for b in blocks((ROOT / "docs" / "offline-scoring.md").read_text()) if b.language in RUN)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "demo").symlink_to(bundle.path)
    write(tmp_path / "rows.parquet", columns())
    environment = os.environ | {"PATH": f"{Path(DPIFRAME).parent}:{os.environ['PATH']}"}
    command = [*RUN[block.language], block.code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert pq.read_table(tmp_path / "scored.parquet").num_rows == ROWS


def test_a_parquet_file_is_read_in_pieces_of_whole_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(700_000)}), tmp_path / "in.parquet", row_group_size=200_000)
    assert pieces(RowFile(tmp_path / "in.parquet")) == [Piece((0, 1), 1), Piece((2, 3), 400_001)]
    (tmp_path / "in.csv").write_text("x\n1\n")
    assert pieces(RowFile(tmp_path / "in.csv")) == [Piece(None, 1)]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("ending", ["parquet", pytest.param("csv", marks=pytest.mark.whole)])
def test_a_cluster_gives_the_same_file(bundle: Bundle, tmp_path: Path, ending: str) -> None:
    values = {name: column * 20 for name, column in columns().items()}
    values["c3"] = [i % 24 for i in range(20 * ROWS)]
    path = write(tmp_path / f"in.{ending}", values)
    if ending == "parquet":  # two pieces
        rows = pq.read_table(path).take(pa.array(np.arange(40_000) % len(values["c3"])))
        pq.write_table(rows.append_column("n", pa.array(np.arange(40_000))), path, row_group_size=10_000)
    _, local = run(job_of(bundle, path, labels=("label",), chunk_rows=8192))
    split = ["--splitter", "bag0=|", "--splitter", "bag1=^"] if ending == "csv" else []
    command = [*SMALL_PIECES, "score", str(bundle.path), path.name, "-o", "ray.parquet", "--device", "cpu", "--label", "label",
               "--engine", "ray", "--workers", "2", *split]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("score: AUC 0.")
    got = pq.read_table(tmp_path / "ray.parquet")
    assert got.schema.equals(local.schema)
    assert got.drop(["score"]).equals(local.drop(["score"]))
    np.testing.assert_allclose(got["score"].to_numpy(), local["score"].to_numpy(), rtol=0, atol=1e-6)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.whole
def test_a_bad_row_on_a_cluster_is_named_as_it_is_here(bundle: Bundle, tmp_path: Path) -> None:
    values = columns()
    values["c3"][431] = 99
    write(tmp_path / "in.csv", values)
    command = [DPIFRAME, "score", str(bundle.path), "in.csv", "-o", "out.parquet", "--device", "cpu", "--engine", "ray",
               "--splitter", "bag0=|", "--splitter", "bag1=^"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    expected = f"error: {tmp_path}/in.csv, row 432, column c3: got 99, expected an id from 0 to 23\n"
    assert (done.returncode, done.stderr) == (1, expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.csv"]
