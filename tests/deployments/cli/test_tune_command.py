"""`dpiframe tune` and `dpiframe profile` as functions: files in, figures and files out."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from deployments.cli.profile_command import write_profile
from deployments.cli.tune_command import Measured, measure, read_batch_sizes, tune, write_tuning
from deployments.config import parse_config
from deployments.offline.output_file import check_outfile, write_outfile
from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.engine.buckets import geometric_buckets
from dpiframe_core.errors import ConfigError, InputError
from dpiframe_core.graph.architecture import DeepFM
from tests.runner import small_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    made: Bundle = small_bundle(tmp_path_factory.mktemp("bundles") / "small", DeepFM(hidden_units=(16, 8)))
    return made


def recorded(path: Path, counts: dict[int, int], max_batch_rows: int = 512) -> Path:
    path.write_text(json.dumps({"max_batch_rows": max_batch_rows, "counts": counts}))
    return path


def test_recordings_of_several_replicas_are_added_up(tmp_path: Path) -> None:
    files = [recorded(tmp_path / "a.json", {3: 1, 100: 7}), recorded(tmp_path / "b.json", {100: 2, 512: 1})]
    counts = read_batch_sizes(files)
    assert {int(rows): int(counts[rows]) for rows in np.flatnonzero(counts)} == {3: 1, 100: 9, 512: 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "got something else, expected JSON"),
        ("[]", "got [], expected an object"),
        ('{"max_batch_rows": 4}', "counts: got nothing, expected a value"),
        ('{"max_batch_rows": 4, "counts": {"5": 1}}', "counts: got a batch of 5 rows, expected 1 to max_batch_rows 4"),
        ('{"max_batch_rows": 4, "counts": {"1": "x"}}', "counts.1: got 'x', expected a valid integer"),
        ('{"max_batch_rows": 4, "counts": {}, "rows": 3}', "rows: got 3, expected no such key"),
        ('{"max_batch_rows": 4, "counts": {"1": 0}}', "counts: got no batches, expected at least one"),
    ],
)
def test_a_file_that_is_no_recording_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_batch_sizes([file])
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_recordings_of_different_services_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: got 'No such file or directory', expected a readable file"):
        read_batch_sizes([tmp_path / "none.json"])
    files = [recorded(tmp_path / "a.json", {3: 1}), recorded(tmp_path / "b.json", {3: 1}, max_batch_rows=64)]
    with pytest.raises(ConfigError, match=r"b\.json: max_batch_rows: got 64, expected 512 as in .*a\.json"):
        read_batch_sizes(files)


def test_the_lines_that_are_printed_are_those_of_a_configuration(bundle: Bundle, tmp_path: Path) -> None:
    file = recorded(tmp_path / "sizes.json", {100: 1000, 230: 1000})
    out = tmp_path / "tuned.json"
    tuning = write_tuning(bundle.path, [file], out, 6, None)
    sizes = tuning.tuned.sizes
    assert len(sizes) <= 6
    assert {100, 230, 512} <= set(sizes)
    config = parse_config({"models": [{"path": "x"}], **yaml.safe_load(tuning.yaml())}, "test")
    assert (config.batching.max_batch_rows, config.batching.buckets) == (512, sizes)
    written = json.loads(out.read_text())
    assert (written["model"], written["fingerprint"], written["cost"]) == ("small", bundle.fingerprint, "rows")
    assert (written["batches"], written["median_rows"]) == (2000, 100)
    assert tuple(written["tuned"]["sizes"]) == sizes
    assert written["tuned"]["padding_waste"] == 0
    # Geometric: 100 -> 128 and 230 -> 256.
    assert written["geometric"]["padding_waste"] == pytest.approx(1 - 330 / 384)
    assert tuning.report().splitlines() == [
        "small 1: 2,000 batches recorded, of 100 rows in the median",
        f"geometric: {len(geometric_buckets(512))} buckets, 14.1% of the rows computed are padding, 192.0 rows a batch",
        f"tuned: {len(sizes)} buckets, 0.0% of the rows computed are padding, 165.0 rows a batch",
    ]


def test_by_default_there_are_as_many_buckets_as_before(bundle: Bundle) -> None:
    counts = np.ones(513, np.int64)
    assert len(tune(bundle, counts, None).tuned.sizes) == len(geometric_buckets(512))


def test_measured_costs_decide_if_they_are_given(bundle: Bundle) -> None:
    counts = np.zeros(65, np.int64)
    counts[[2, 30, 60]] = 100
    costs = np.where(np.arange(65) <= 30, 10.0, 40.0)
    tuning = tune(bundle, counts, 2, Measured(costs, "a GPU at tf32"))
    assert (tuning.cost, tuning.device) == ("microseconds", "a GPU at tf32")
    assert tuning.tuned.sizes == (30, 64)
    assert tuning.tuned.mean_cost == pytest.approx((10 + 10 + 40) / 3)
    assert tuning.report().endswith("20.0 us a batch")


def test_there_is_nothing_to_measure_on_a_cpu(bundle: Bundle) -> None:
    with pytest.raises(InputError, match="--measure: got 'a CPU', expected a GPU: on a CPU batches run at their own size"):
        measure(bundle, 64, "cpu", None)


@pytest.mark.gpu
def test_measured_on_a_gpu(bundle: Bundle) -> None:
    measured = measure(bundle, 64, "cuda", "tf32")
    assert measured.costs.shape == (65,)
    assert (measured.costs > 0).all()
    assert measured.device.endswith(" at tf32")


def test_a_profile_is_written_and_drawn(bundle: Bundle, tmp_path: Path) -> None:
    out, plot = tmp_path / "trace.json", tmp_path / "trace.png"
    said = write_profile(bundle.path, 16, out, plot, "cpu", None)
    assert said.splitlines()[1:] == [f"written: {out} (open it in ui.perfetto.dev)", f"drawn: {plot}"]
    names = {e["name"] for e in json.loads(out.read_text())["traceEvents"]}
    assert {"embedding/lookup (lookup)", "fm/fm (fm)", "deep/deep.0 (linear)", "head/head (head)"} <= names
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_files_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    for call in (
        lambda: write_profile(Path("no bundle"), 1, tmp_path / "none" / "x.json", None, "cpu", None),
        lambda: write_tuning(Path("no bundle"), [], tmp_path / "none" / "x.json", None, None),
    ):
        with pytest.raises(
            InputError, match=r"--out: got '.*x\.json', expected a file in a folder that exists; .*none does not"
        ):
            call()
    with pytest.raises(InputError, match=r"--plot: got 'x.bmp', expected a name that ends in .png or .svg or .pdf"):
        write_profile(Path("no bundle"), 1, tmp_path / "x.json", Path("x.bmp"), "cpu", None)
    with pytest.raises(InputError, match=r"--out: got .*, expected a file, not a folder"):
        check_outfile("--out", tmp_path)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "model.yaml").write_text("format: dpiframe-bundle/1\n")
    (tmp_path / "link").symlink_to(tmp_path / "bundle")
    for folder in ("bundle", "link"):
        with pytest.raises(InputError, match=r"expected a path outside of the bundle .*bundle, which loads with its own files"):
            check_outfile("--out", tmp_path / folder / "x.json")
    with pytest.raises(InputError, match=r"--out: got .*, expected a file that may be written \(Is a directory\)"):
        write_outfile("--out", tmp_path, "text")
