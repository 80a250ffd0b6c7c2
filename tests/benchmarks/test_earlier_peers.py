"""Measuring again, or tidying, makes no peer weaker: the fastest compiled peers of earlier runs stay, each with its own run."""

import json
from pathlib import Path

import pytest

from benchmarks.records.record import identity, record
from benchmarks.records.result_file import ResultFile
from benchmarks.report.results import Results
from benchmarks.systems.names import COMPILED
from benchmarks.timing import Times

FACTS = ("gpu", "driver", "cpu", "python", "torch", "commit", "date")
STORED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*.json"))
FIRST = {"gpu": "NVIDIA H200", "cpu": "one", "commit": "abc", "date": "Monday"}
SECOND = FIRST | {"commit": "def", "date": "Tuesday"}


def measured(system, p50, batch=256, **more):
    return record("latency", system, model="dcn", batch=batch, precision="tf32", times=Times(p50, p50, 9), **more)


def run(path, facts, *records, append=False):
    file = ResultFile(path, facts, append=append)
    for r in records:
        file.add(r)
    return json.loads(path.read_text())


def test_a_run_in_the_place_of_another_keeps_its_compiled_peers_and_whose_they_are(tmp_path):
    path = tmp_path / "latency.json"
    run(path, FIRST, measured("dpiframe", 9), measured("eager", 80), measured("compile-captured", 15))
    stored = run(path, SECOND, measured("dpiframe", 10), measured("compile-captured", 30, products="ATEN"))
    assert stored["run"] == SECOND
    assert [(e["run"], [r["p50_us"] for r in e["records"]]) for e in stored["earlier_peers"]] == [(FIRST, [15])]
    results = Results.read(tmp_path)
    (cell,) = results.cells("latency")
    assert {s: r["p50_us"] for s, r in cell.items()} == {"compile-captured": 15, "dpiframe": 10, "compile-captured (ATEN)": 30}
    assert results.runs[cell["compile-captured"]["file"]] == FIRST
    assert results.runs[cell["dpiframe"]["file"]] == SECOND


@pytest.mark.parametrize("times", [(15, 30, 20), (30, 15, 20)])
def test_of_several_earlier_runs_the_fastest_peer_of_a_cell_stays(tmp_path, times):
    path = tmp_path / "latency.json"
    for facts, us in zip((FIRST, SECOND, FIRST | {"date": "Wednesday"}), times, strict=True):
        stored = run(path, facts, measured("compile-captured", us))
    assert [r["p50_us"] for e in stored["earlier_peers"] for r in e["records"]] == [15]
    (cell,) = Results.read(tmp_path).cells("latency")
    assert cell["compile-captured"]["p50_us"] == 15


def test_cells_that_are_appended_leave_the_kept_peers_as_they_are(tmp_path):
    path = tmp_path / "latency.json"
    for facts, append in ((FIRST, False), (SECOND, False), (SECOND, True)):
        stored = run(path, facts, measured("compile-captured", 15 if facts is FIRST else 20), append=append)
    assert [(e["run"], [r["p50_us"] for r in e["records"]]) for e in stored["earlier_peers"]] == [(FIRST, [15])]
    assert len(stored["records"]) == 1


def test_fewer_products_that_are_appended_leave_the_fastest_peer(tmp_path):
    path = tmp_path / "latency.json"
    run(path, FIRST, measured("dpiframe", 10), measured("compile-captured", 15))
    run(path, FIRST | {"date": "Tuesday"}, measured("compile-captured", 30, products="ATEN"), append=True)
    (cell,) = Results.read(tmp_path).cells("latency")
    assert {s: r["p50_us"] for s, r in cell.items()} == {"dpiframe": 10, "compile-captured": 15, "compile-captured (ATEN)": 30}


@pytest.mark.parametrize(("again", "kept"), [(30, [15]), (12, [])])
def test_a_peer_that_is_appended_again_and_slower_leaves_the_faster_one_with_its_run(tmp_path, again, kept):
    path = tmp_path / "latency.json"
    run(path, FIRST, measured("compile-captured", 15), measured("compile-captured", 50, batch=1))
    both = measured("compile-captured", again), measured("compile-captured", 60, batch=1)
    stored = run(path, FIRST | {"date": "Tuesday"}, *both, append=True)
    assert [r["p50_us"] for r in stored["records"]] == [again, 60]
    (earlier,) = stored["earlier_peers"]  # one run, not one a record
    assert earlier["run"] == FIRST
    assert sorted(r["p50_us"] for r in earlier["records"]) == [*kept, 50]
    assert min(r["p50_us"] for c in Results.read(tmp_path).cells("latency", batch=256) for r in c.values()) == min(15, again)


def test_earlier_runs_of_one_second_are_told_apart_by_their_commit(tmp_path):
    file = ResultFile(tmp_path / "latency.json", SECOND)
    for batch, commit in ((1, "abc"), (64, "xyz")):
        earlier = {"run": FIRST | {"commit": commit}, "records": [measured("compile-captured", 15, batch=batch)]}
        file.earlier_peers.append(earlier)
    file.add(measured("dpiframe", 10))
    results = Results.read(tmp_path)
    assert {r["batch"]: results.runs[r["file"]]["commit"] for r in results.records} == {256: "def", 1: "abc", 64: "xyz"}


@pytest.mark.parametrize("other", [{"gpu": "another"}, {"gpu": None}, {"gpu": None, "cpu": "another"}])
def test_a_peer_of_another_machine_is_not_kept(tmp_path, other):
    path = tmp_path / "latency.json"
    run(path, FIRST, measured("compile-captured", 15))
    assert "earlier_peers" not in run(path, SECOND | other, measured("compile-captured", 20))


@pytest.mark.parametrize("path", STORED, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_what_is_stored_says_of_every_record_where_it_comes_from(path):
    stored = json.loads(path.read_text())
    assert set(FACTS) <= stored["run"].keys()
    for earlier in stored.get("earlier_peers", ()):
        assert set(FACTS) <= earlier["run"].keys()
        assert earlier["run"] != stored["run"]
        assert earlier["run"]["gpu"] == stored["run"]["gpu"]
        assert {r["system"] for r in earlier["records"]} <= set(COMPILED)
    for other in stored.get("other_cells", ()):
        assert set(FACTS) <= other["run"].keys()
        assert other["run"]["gpu"] == stored["run"]["gpu"]
        assert not {identity(r) for r in other["records"]} & {identity(r) for r in stored["records"]}


def test_latencies_of_all_models_are_in_one_file_a_precision():
    found = {}
    for path in (p for p in STORED if p.parent.name == "h200"):
        stored = json.loads(path.read_text())
        for part in (stored, *stored.get("other_cells", ())):
            for r in (r for r in part["records"] if r["suite"] == "latency"):
                found.setdefault(r["precision"], set()).add(path.name)
    assert found == {p: {f"latency-{p}.json"} for p in ("bf16", "fp32", "fp8", "tf32")}


def test_the_stored_h200_cells_have_peers_of_earlier_runs():
    kept = {p.name for p in STORED if p.parent.name == "h200" and json.loads(p.read_text()).get("earlier_peers")}
    assert kept == {"latency-bf16.json", "latency-fp32.json", "latency-tf32.json"}
