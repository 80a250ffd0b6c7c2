"""Records on disk: valid after every one, appended to by cell, compared within a cell."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import typer

from benchmarks import host_cores
from benchmarks.host_cores import on_quickest_core
from benchmarks.records.record import record
from benchmarks.records.result_file import ResultFile
from benchmarks.records.run import Run
from benchmarks.report.results import Results
from benchmarks.timing import Times, interleaved, times_of

RUN = {"gpu": "NVIDIA H200", "commit": "abc", "date": "today"}


def entry(system, p50, batch=1, **more):
    return record("latency", system, model="dcn", batch=batch, precision="tf32", times=Times(p50, 2 * p50, 9), **more)


def stored(path):
    return json.loads(path.read_text())


def test_a_record_has_every_field_of_the_issue_and_null_where_it_means_nothing():
    fields = "suite, system, model, batch, precision, p50_us, p99_us, device_us, rows_per_s, max_abs_err, speedup_vs"
    bare = record("floor", "machine", launch_us=8.8)
    assert set(fields.split(", ")) <= bare.keys()
    assert bare["p50_us"] is bare["device_us"] is bare["rows_per_s"] is bare["speedup_vs"] is None
    assert bare["launch_us"] == 8.8


def test_rows_a_second_are_the_batch_over_the_median():
    assert entry("dpiframe", 20.0, batch=100)["rows_per_s"] == 5_000_000


def test_the_file_is_whole_after_every_record(tmp_path):
    file = ResultFile(tmp_path / "new" / "latency.json", RUN)
    for i, system in enumerate(("dpiframe", "eager", "compile")):
        file.add(entry(system, 10.0))
        assert [r["system"] for r in stored(file.path)["records"]] == ["dpiframe", "eager", "compile"][: i + 1]
    assert stored(file.path)["run"] == RUN
    assert [p.name for p in file.path.parent.iterdir()] == ["latency.json"]


def test_a_cell_is_compared_with_itself_alone_also_over_two_runs(tmp_path):
    first = ResultFile(tmp_path / "latency.json", RUN)
    for r in (entry("dpiframe", 10.0), entry("eager", 100.0), entry("eager", 500.0, batch=4)):
        first.add(r)
    second = ResultFile(tmp_path / "latency.json", RUN | {"date": "tomorrow"}, append=True)
    second.add(entry("compile", 25.0))
    found = {(r["system"], r["batch"]): r["speedup_vs"] for r in stored(second.path)["records"]}
    assert found == {
        ("dpiframe", 1): {"eager": 10.0, "compile": 2.5},
        ("eager", 1): {"dpiframe": 0.1, "compile": 0.25},
        ("compile", 1): {"dpiframe": 0.4, "eager": 4.0},
        ("eager", 4): {},
    }


def test_a_cell_that_is_measured_again_replaces_its_record_in_place(tmp_path):
    file = ResultFile(tmp_path / "latency.json", RUN)
    for r in (entry("dpiframe", 10.0), entry("eager", 90.0), entry("dpiframe", 9.0), entry("dpiframe", 8.0, cell={"ids": "x"})):
        file.add(r)
    assert [(r["system"], r["p50_us"]) for r in file.records] == [("dpiframe", 9.0), ("eager", 90.0), ("dpiframe", 8.0)]


def test_records_of_another_gpu_are_not_mixed_in(tmp_path):
    ResultFile(tmp_path / "latency.json", RUN).add(entry("eager", 90.0))
    file = ResultFile(tmp_path / "latency.json", RUN | {"gpu": "another"}, append=True)
    assert (file.records, file.other_cells) == ([], [])
    assert file.dropped == "records of gpu NVIDIA H200, commit abc"


def test_cells_of_another_commit_stay_with_their_run_until_they_are_measured_anew(tmp_path):
    path, later = tmp_path / "latency.json", RUN | {"commit": "def"}
    first = ResultFile(path, RUN)
    for r in (entry("dpiframe", 10.0), entry("dpiframe", 20.0, batch=4), entry("eager", 90.0, batch=4)):
        first.add(r)
    second = ResultFile(path, later, append=True)
    assert second.dropped is None
    second.add(entry("dpiframe", 18.0, batch=4))
    found = {(r["system"], r["batch"]): (r["p50_us"], run["commit"]) for run, r in whose(stored(path))}
    assert found == {("dpiframe", 4): (18.0, "def"), ("dpiframe", 1): (10.0, "abc"), ("eager", 4): (90.0, "abc")}
    results = Results.read(tmp_path)
    assert {c["dpiframe"]["batch"]: c["dpiframe"]["p50_us"] for c in results.cells("latency")} == {1: 10.0, 4: 18.0}
    ResultFile(path, later, append=True).add(entry("dpiframe", 9.0))
    ResultFile(path, later, append=True).add(entry("eager", 80.0, batch=4))
    assert "other_cells" not in stored(path)


@pytest.mark.parametrize(("again", "kept"), [(30.0, [15.0]), (12.0, [])])
def test_a_peer_among_other_cells_that_a_slower_one_replaces_is_still_kept(tmp_path, again, kept):
    path = tmp_path / "latency.json"
    ResultFile(path, RUN).add(entry("compile-captured", 15.0))
    ResultFile(path, RUN | {"commit": "def"}, append=True).add(entry("compile-captured", again))
    found = stored(path)
    assert [(e["run"], r["p50_us"]) for e in found.get("earlier_peers", ()) for r in e["records"]] == [(RUN, us) for us in kept]
    assert [r["p50_us"] for r in found["records"]] == [again]


def whose(found):
    """Every record of a file with the run that it is of."""
    return [(part["run"], r) for part in (found, *found.get("other_cells", ())) for r in part["records"]]


def test_records_of_another_processor_are_not_mixed_in_where_there_is_no_gpu(tmp_path):
    path, here = tmp_path / "latency.json", RUN | {"gpu": None, "cpu": "one"}
    ResultFile(path, here).add(entry("eager", 90.0))
    assert ResultFile(path, here, append=True).records
    file = ResultFile(path, here | {"cpu": "another"}, append=True)
    assert file.records == []
    assert file.dropped == "records of cpu one, commit abc"


def test_a_run_that_replaces_records_says_so_if_they_are_another_machines(tmp_path, capsys):
    path = tmp_path / "latency.json"
    ResultFile(path, RUN).add(entry("eager", 90.0))
    assert ResultFile(path, RUN | {"commit": "def"}).dropped is None
    assert ResultFile(path, RUN | {"gpu": "another"}).dropped == "records of gpu NVIDIA H200, commit abc"
    Run("latency", "cpu", 0, path, append=False)
    assert "records of gpu NVIDIA H200, commit abc will be replaced" in capsys.readouterr().out


FOREIGN = ['{"run": {"gpu"', "[]", "{}", '{"run": [], "records": []}', '{"run": {}, "records": [1]}', "\0"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_that_holds_no_results_is_replaced_with_a_word_said(tmp_path, capsys, text):
    path = tmp_path / "latency.json"
    path.write_text(text)
    Run("latency", "cpu", 0, path, append=False).add(entry("eager", 90.0))
    assert "what stands there and holds no results will be replaced" in capsys.readouterr().out
    assert [r["system"] for r in stored(path)["records"]] == ["eager"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_that_holds_no_results_is_not_appended_to(tmp_path, text):
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"got a file that holds no results, expected one to append to$"):
        Run("latency", "cpu", 0, path, append=True)
    assert path.read_text() == text


def test_one_system_with_fewer_products_is_another_one_in_the_comparison(tmp_path):
    file = ResultFile(tmp_path / "latency.json", RUN)
    for r in (entry("dpiframe", 10.0), entry("compile", 15.0), entry("compile", 30.0, products="ATEN")):
        file.add(r)
    assert file.records[0]["speedup_vs"] == {"compile": 1.5, "compile (ATEN)": 3.0}


def test_results_are_found_by_record_and_cell_fields(tmp_path):
    file = ResultFile(tmp_path / "latency.json", RUN)
    for r in (entry("dpiframe", 10.0, cell={"ids": "zipf"}), entry("eager", 90.0, cell={"ids": "uniform"})):
        file.add(r)
    results = Results.read(tmp_path)
    assert [r["system"] for r in results.of("latency", model="dcn", ids="uniform")] == ["eager"]
    assert [list(cell) for cell in results.cells("latency")] == [["dpiframe"], ["eager"]]
    assert results.of("floor") == []


def test_medians_and_percentiles_are_of_single_calls():
    assert times_of([i / 1e6 for i in range(1, 101)]) == Times(50.5, 100.0, 100)


def test_a_call_that_times_itself_is_taken_at_its_word():
    times = interleaved({"a": lambda i: 0.5, "b": lambda i: 0.25 + 0.25 * (i % 2)}, 0.001)
    assert (times["a"].p50_us, times["a"].p99_us) == (500_000, 500_000)
    assert times["b"].p99_us == 500_000
    assert times["a"].calls >= 20


def test_a_round_is_timed_within_what_is_asked_for():
    said = []

    @contextmanager
    def around():
        said.append("in")
        yield
        said.append("out")

    times = interleaved({"a": lambda i: said.append("call") or 0.5}, 0.0, warmups=3, least=2, around=around)
    assert said == ["call"] * 3 + ["in", "call", "call", "out"] * 5
    assert times["a"].calls == 10


def test_one_thread_alone_is_on_one_core_while_a_cell_is_timed_and_free_again_if_that_fails():
    before, seen = os.sched_getaffinity(0), []

    def fails(other):
        with on_quickest_core():
            seen.extend((os.sched_getaffinity(0), other.submit(os.sched_getaffinity, 0).result()))
            raise ZeroDivisionError

    with ThreadPoolExecutor(1) as other:
        other.submit(int).result()
        with pytest.raises(ZeroDivisionError):
            fails(other)
    assert (len(seen[0]), seen[1], os.sched_getaffinity(0)) == (1, before, before)


def test_the_core_that_is_quickest_is_taken(monkeypatch):
    cores, took = os.sched_getaffinity(0), {}
    monkeypatch.setattr(host_cores, "_turn_s", lambda: took.setdefault(min(os.sched_getaffinity(0)), 1.0 - 0.1 * len(took)))
    with on_quickest_core():
        assert os.sched_getaffinity(0) == {list(took)[-1]}
    assert took.keys() == cores


def test_a_run_that_measures_nothing_says_so(tmp_path, capsys):
    run = Run("ablation", "cpu", 0, tmp_path / "ablation.json", append=False)
    with pytest.raises(typer.Exit):
        run.finish([])
    assert "got nothing to measure, expected precisions and systems of which cpu has some" in capsys.readouterr().err
