"""RESULTS.md and its aims come from the records, and from nothing else."""

import pytest

from benchmarks.records.record import record
from benchmarks.records.result_file import ResultFile
from benchmarks.records.run import RESULTS
from benchmarks.report import plots, results_page
from benchmarks.report.aims import CPU_AIMS, GPU_AIMS, NOTHING
from benchmarks.report.results import Results
from benchmarks.systems.embedding_cells import Cell
from benchmarks.systems.names import PAPER_MODELS as MODELS
from benchmarks.timing import Times

RUN = {
    "gpu": "NVIDIA H200",
    "driver": "1",
    "cpu": "x",
    "torch": "2",
    "cupy": "14",
    "fbgemm": None,
    "commit": "abc",
    "date": "now",
    "seed": 0,
}


def verdict(what, *records):
    (aim,) = [a for a in (*GPU_AIMS, *CPU_AIMS) if a.what == what]
    return aim.judge(Results({}, tuple({"cell": {}, **r} for r in records)))


def latency(system, p50, model="dcn", batch=256, precision="tf32"):
    return record("latency", system, model=model, batch=batch, precision=precision, times=Times(p50, p50, 9), max_abs_err=0.0)


def lookup(system, device_us, cell, p50=10.0):
    rate = round(cell.bytes_moved / device_us * 1e6)
    return record(
        "embedding",
        system,
        batch=cell.batch,
        cell=cell.named(),
        times=Times(p50, p50, 9),
        device_us=device_us,
        bytes_per_s=rate,
    )


@pytest.mark.parametrize("aim", [*GPU_AIMS, *CPU_AIMS], ids=lambda a: a.what)
def test_an_aim_without_a_measurement_is_neither_met_nor_missed(aim):
    assert aim.judge(Results({}, ())) == NOTHING


def test_a_peer_that_had_fewer_products_to_choose_from_does_not_hide_a_faster_one_of_another_run(tmp_path):
    for name, ours, peer, of in (("latency-before.json", 12, 15, {}), ("latency.json", 10, 30, {"products": "ATEN"})):
        file = ResultFile(tmp_path / name, RUN)
        file.add(latency("dpiframe", ours))
        file.add({**latency("compile-captured", peer), **of})
    (cell,) = Results.read(tmp_path).cells("latency")
    assert {s: r["p50_us"] for s, r in cell.items()} == {"dpiframe": 10, "compile-captured": 15, "compile-captured (ATEN)": 30}
    table = results_page.write(tmp_path)
    assert "| model | B | dpiframe | compile-captured | compile-captured (ATEN) | device | over the best peer |" in table
    assert "| dcn | 256 | 10.0 (10.0) | 15.0 (15.0) | 30.0 (30.0) |  | 1.50x |" in table


@pytest.mark.parametrize(("first", "last"), [(15, 30), (30, 15)])
def test_of_several_runs_ours_and_eager_stand_with_the_last_and_a_compiled_peer_with_the_fastest(tmp_path, first, last):
    for name, ours, eager, peer in (("latency-before.json", 9, 80, first), ("latency.json", 10, 90, last)):
        file = ResultFile(tmp_path / name, RUN)
        for system, us in (("dpiframe", ours), ("eager", eager), ("compile-captured", peer)):
            file.add(latency(system, us))
    (cell,) = Results.read(tmp_path).cells("latency")
    assert {s: r["p50_us"] for s, r in cell.items()} == {"dpiframe": 10, "eager": 90, "compile-captured": 15}


@pytest.mark.parametrize(("slowest", "met"), [(12.0, True), (11.9, False)])
def test_eager_must_be_beaten_on_average_and_in_the_worst_cell(slowest, met):
    gains = [40.0] * 7 + [slowest]
    cells = [(m, b) for m in MODELS for b in (256, 1024)]
    records = [
        r
        for (m, b), g in zip(cells, gains, strict=True)
        for r in (latency("dpiframe", 10, m, b), latency("eager", 10 * g, m, b))
    ]
    found = verdict("four models over eager, tf32, B = 256, 1024", *records)
    assert found.met is met
    assert f"least {slowest:.2f}x (8 of 8 cells)" in found.figure


def test_an_aim_is_not_met_before_all_its_cells_are_measured():
    some = [r for b in (256, 1024) for r in (latency("dpiframe", 10, batch=b), latency("eager", 900, batch=b))]
    assert verdict("four models over eager, tf32, B = 256, 1024", *some).met is None
    slow = [latency("dpiframe", 100, batch=256), latency("eager", 900, batch=256)]
    assert verdict("four models over eager, tf32, B = 256, 1024", *slow).met is False


def test_the_best_peer_counts_and_only_where_a_strong_one_was_measured():
    weak = [latency("dpiframe", 10, batch=64), latency("eager", 900, batch=64)]
    strong = [latency("dpiframe", 10), latency("eager", 900), latency("compile-captured", 9), latency("fbgemm-captured", 20)]
    found = verdict("over the best peer, tf32", *weak, *strong)
    assert found.met is False
    assert found.figure == "geometric mean 0.90x, least 0.90x (1 of 20 cells)"


def test_lookups_are_compared_by_device_time_in_the_cells_that_the_aim_names():
    near, far = Cell(dtype="float16"), Cell(dtype="float16", ids="uniform")
    what = "lookup against FBGEMM, device time, dim 16, B = 1024"
    records = [lookup("dpiframe", 2.0, near), lookup("fbgemm-captured", 6.1, near)]
    records += [lookup("dpiframe", 2.0, far), lookup("fbgemm-captured", 2.0, far)]
    assert verdict(what, *records).met is True
    assert verdict(what, lookup("dpiframe", 2.0, near), lookup("fbgemm-captured", 5.9, near)).met is False


def test_bandwidth_is_held_against_the_fastest_gather():
    cell = Cell(65536, 128, ids="uniform", large=True)
    records = [lookup("dpiframe", 100.0, cell), lookup("gather-1", 95.0, cell), lookup("gather-4", 80.0, cell)]
    found = verdict("lookup bandwidth, B = 65536, against a plain gather", *records)
    assert (found.figure, found.met) == ("float32 dim 128 80%", False)


def test_lanes_must_raise_the_rate_in_every_cell():
    def lanes(n, rate, batch):
        return record("utilisation", "dpiframe", model="dcn", batch=batch, precision="tf32", cell={"lanes": n}, rows_per_s=rate)

    better = [lanes(1, 10, 64), lanes(2, 15, 64), lanes(4, 9, 64)]
    what = "two or more lanes over one, saturated"
    assert verdict(what, *better).met is True
    assert verdict(what, *better, lanes(1, 10, 256), lanes(2, 9, 256)).met is False


def test_a_report_has_a_section_and_pictures_for_each_suite_measured(tmp_path):
    file = ResultFile(tmp_path / "latency.json", RUN)
    for batch in (1, 256):
        for system, p50 in (("dpiframe", 10.0), ("eager", 321.0), ("compile-captured", 15.0)):
            file.add(latency(system, p50, batch=batch))
    file = ResultFile(tmp_path / "embedding.json", RUN)
    for cell in (Cell(), Cell(batch=16), Cell(dim=64), Cell(dtype="int8"), Cell(65536, ids="uniform", large=True)):
        for system, us in (("dpiframe", 2.0), ("fbgemm-captured", 7.5), ("gather-4", 1.0)):
            file.add(lookup(system, us, cell))
    text = results_page.write(tmp_path)
    assert text == (tmp_path / "RESULTS.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Aims", "## latency", "## embedding"]
    assert "| dcn | 256 | 10.0 (10.0) | 321 (321) | 15.0 (15.0) |  | 1.50x |" in text
    assert "NVIDIA H200, driver 1, torch 2, CuPy 14, host x, commit abc, now." in text
    assert "| over the best peer, tf32 | >= 1.5x in geometric mean, never below 1.0x | geometric mean 1.50x" in text
    shown = {line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")}
    assert shown == {p.name for p in tmp_path.glob("*.png")}
    assert {"latency-tf32.png", "speedup-tf32.png", "embedding-device.png"} <= shown


def test_a_machine_without_a_gpu_is_held_against_the_aims_for_one(tmp_path):
    ResultFile(tmp_path / "latency.json", RUN | {"gpu": None, "driver": None}).add(latency("dpiframe", 1.0, precision="fp32"))
    assert CPU_AIMS[0].what in results_page.write(tmp_path)


def test_of_two_files_with_one_cell_the_later_name_stands(tmp_path):
    for name, time in (("floor-before", 20.0), ("floor", 10.0)):
        ResultFile(tmp_path / f"{name}.json", RUN).add(latency("dpiframe", time) | {"suite": "floor", "ratio": time})
    results = Results.read(tmp_path)
    assert [r["ratio"] for r in results.of("floor", system="dpiframe")] == [20.0, 10.0]
    assert [r["ratio"] for r in results.latest("floor", system="dpiframe")] == [10.0]


def test_speed_ups_of_many_models_stand_in_rows_whose_batch_sizes_keep_their_places():
    figure = dict(plots.figures("latency", Results.read(RESULTS / "h200")))["speedup-tf32"]
    assert figure.get_figwidth() <= 12  # inches: a page shows no more
    assert len(figure.axes) > 1
    sizes = [f"B = {rows}" for rows in (1, 64, 256, 1024, 4096)]
    assert all([bars.get_label() for bars in panel.containers] == sizes for panel in figure.axes)
