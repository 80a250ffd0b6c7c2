"""The report stands records that are partial or of other cells: a row or a table less, never an error, never a wrong cell."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.records.run import RESULTS
from benchmarks.report import pages, performance, plots, results_page, speed_chart
from benchmarks.report.results import Results

MACHINES = sorted(p.name for p in RESULTS.iterdir() if p.is_dir())
STORED = {name: Results.read(RESULTS / name) for name in MACHINES}
FILES = sorted(f"{p.parent.name}/{p.name}" for p in RESULTS.glob("*/*.json"))
SYSTEMS = sorted({(name, r["suite"], r["system"]) for name in MACHINES for r in STORED[name].records})


def only(name: str, keep) -> Results:
    """A machine's stored results, of the records that are kept, and their runs."""
    records = tuple(r for r in STORED[name].records if keep(r))
    return Results({r["file"]: STORED[name].runs[r["file"]] for r in records}, records)


def pages_build(name: str, results: Results) -> None:
    parts = pages.parts(STORED | {name: results}, "")
    assert all(isinstance(line, str) for part in parts.values() for line in part)
    assert results_page.page(results).startswith("# Results")


@pytest.mark.parametrize("file", FILES)
def test_all_pages_build_without_one_of_the_stored_files(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_FIGURES", {})  # they cost seconds, and have tests below
    machine, _, name = file.partition("/")
    pages_build(machine, only(machine, lambda r: not r["file"].startswith(name)))


@pytest.mark.parametrize("file", FILES)
def test_all_pages_build_if_a_machine_has_one_file_alone(file: str) -> None:
    machine, _, name = file.partition("/")
    pages_build(machine, only(machine, lambda r: r["file"].startswith(name)))


@pytest.mark.parametrize("machine", MACHINES)
def test_all_pages_build_without_any_one_system(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_FIGURES", {})
    for of, suite, system in SYSTEMS:
        if of == machine:
            pages_build(machine, only(machine, lambda r, gone=(suite, system): (r["suite"], r["system"]) != gone))


@pytest.mark.parametrize("suite", sorted(plots._FIGURES))
def test_pictures_are_drawn_without_us_and_of_us_alone(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At few dots, and of a suite with a picture a precision and a panel a model one picture of some panels."""
    monkeypatch.setattr(plots, "_saved", lambda figure, path: figure.savefig(path, dpi=20))
    models = list(dict.fromkeys(r["model"] for r in STORED["h200"].of(suite)))[:3] if suite == "latency" else None
    for ours in (True, False):

        def kept(r, ours=ours) -> bool:
            few = models is None or ((r["suite"], r.get("precision")) == (suite, "tf32") and r["model"] in models)
            return (r["system"] == "dpiframe") is ours and few

        plots.draw(suite, only("h200", kept), tmp_path)
    assert models is None or list(tmp_path.iterdir()), "what was kept has a picture"


def test_all_pages_build_if_a_gpus_cells_lack_their_optional_figures() -> None:
    optional = dict.fromkeys(("device_us", "sm_active", "sm_occupancy", "dram_active", "kernel_share", "kernel_union"))
    records = tuple(r | dict.fromkeys(optional.keys() & r.keys()) for r in STORED["h200"].records)
    pages_build("h200", Results(STORED["h200"].runs, records))


def test_all_pages_build_if_the_cpus_latency_is_of_one_model_and_batch() -> None:
    one = only("cpu", lambda r: r["suite"] != "latency" or (r["model"], r["batch"]) == ("dcn", 64))
    assert {r["model"] for r in one.of("latency")} == {"dcn"}
    pages_build("cpu", one)


def test_a_picture_of_nothing_is_not_drawn(tmp_path: Path) -> None:
    speed_chart.draw(Results({}, ()), tmp_path / "speed.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cell", [{"ids": "uniform", "buckets": "exact"}, {"ids": "zipf", "buckets": "default"}])
def test_other_cells_enter_no_table_without_a_label_and_no_mean(cell: dict[str, str]) -> None:
    h200 = STORED["h200"]
    suites = ("latency", "floor", "ablation", "first_op", "utilisation")
    others = tuple(
        r | {"p50_us": r["p50_us"] * 7, "rows_per_s": 1, "ratio": 99.0, "cell": r["cell"] | cell}
        for r in h200.records
        if r["suite"] in suites and r["system"] != "machine"
    )
    more = Results(h200.runs, h200.records + others)
    assert len(more.gains()) == len(h200.gains()) > 0
    assert speed_chart.speeds(more) == speed_chart.speeds(h200)
    assert pages.parts(STORED | {"h200": more}, "") == pages.parts(STORED, "")
    assert results_page._aims(more) == results_page._aims(h200)
    of_others = Results(h200.runs, others)
    assert performance.models(of_others, "tf32") == performance.fp8(of_others) == []
    label = "serving buckets, " if cell["ids"] == "zipf" else "uniform ids, "
    assert results_page.page(of_others).count(f"| {label}") >= len(others) // 10


def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the records and of the pages' words, that the report takes for its own."""
    results = tmp_path / "benchmarks" / "results"
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("*.png"))
    (tmp_path / "docs").mkdir()
    for page in pages.PAGES:
        shutil.copy(pages.ROOT / page, tmp_path / page)
    monkeypatch.setattr(pages, "RESULTS", results)
    monkeypatch.setattr(pages, "PICTURE", tmp_path / "docs" / "img" / "speed.png")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    return results


def test_nothing_is_written_if_a_text_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_FIGURES", {})
    results = copied(tmp_path, monkeypatch)
    (results / "cpu" / "RESULTS.md").write_text("old")
    with (tmp_path / "docs" / "performance.md").open("a") as page:
        page.write("<!-- generated: nobody -->\n<!-- end -->\n")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="got a generated part 'nobody'"):
        pages.write()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_the_report_of_partial_records_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = copied(tmp_path, monkeypatch)
    for folder in ("h200", "h100", "h100x2", "h200x2", "h200x4", "cpu-amd", "h200-all-peers"):
        shutil.rmtree(results / folder)
    latency = json.loads((results / "cpu" / "latency.json").read_text())
    latency["records"] = [r for r in latency["records"] if (r["model"], r["batch"], r["system"]) != ("dcn", 64, "compile")]
    (results / "cpu" / "latency.json").write_text(json.dumps(latency))
    written = pages.write()
    assert {p.parent.name for p in written if p.name == "RESULTS.md"} == {"cpu", "cpu-second-intel", "h200-second-host"}
    assert "#tf32" not in (tmp_path / "README.md").read_text()
    assert "A call on two CPU cores" in (tmp_path / "README.md").read_text()
    assert not pages.PICTURE.exists()
