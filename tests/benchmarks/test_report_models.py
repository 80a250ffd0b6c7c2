"""Pages, pictures and aims cope with the models beside the four: sequences by contexts, MLPerf's shape, compiled modules."""

import pytest

from benchmarks.records.record import record, title
from benchmarks.records.result_file import ResultFile
from benchmarks.records.run import RESULTS
from benchmarks.report import pages, performance, results_page, speed_chart
from benchmarks.report.aims import GPU_AIMS, NOTHING
from benchmarks.report.architectures import architectures
from benchmarks.report.imported import imported
from benchmarks.report.results import Results, best_peer
from benchmarks.systems.names import BATCHES, CONTEXTS, MODEL_TITLES, PAPER_MODELS, WITH_CONTEXTS, architecture_of
from benchmarks.timing import Times
from tests.benchmarks.test_report import RUN

NEW = ("latency", "mlperf")  # suites that have the other models
EACH, OWN = "every architecture over the best peer, tf32", "bf16 over our own tf32 where products rule, B >= 1024"


def latency(system, p50, model, batch, contexts, precision="tf32"):
    cell = {"ids": "zipf", "buckets": "exact"} | ({"contexts": contexts} if model in WITH_CONTEXTS else {})
    times = Times(p50, p50, 9)
    return record("latency", system, model=model, batch=batch, precision=precision, cell=cell, times=times, max_abs_err=0.0)


def every_cell(models=MODEL_TITLES):
    for model in models:
        for batch in BATCHES:
            yield from ((model, batch, n) for n in (CONTEXTS if model in WITH_CONTEXTS else (1,)) if n <= batch)


def measured(gain=lambda model, batch: 2.0, models=MODEL_TITLES):
    """Results of every cell: ours 10 us, compile-captured slower than compile-mapped, which is `gain` times ours."""
    found = []
    for where in every_cell(models):
        over = gain(*where[:2])
        peers = {"eager": 900, "compile-captured": 10 * over + 1, "compile-mapped": 10 * over}
        found += [latency("dpiframe", 10, *where), *(latency(s, us, *where) for s, us in peers.items())]
    return Results({}, tuple(found))


def verdict(what, results):
    (aim,) = [a for a in GPU_AIMS if a.what == what]
    return aim.judge(results)


def test_the_best_of_captured_and_mapped_is_the_best_peer():
    found = measured().gains()
    assert {g.peer["system"] for g in found} == {"compile-mapped"}
    assert len(found) == len(list(every_cell())) == 5 * (len(MODEL_TITLES) - 2) + 13 * 2


def test_our_own_rows_in_place_are_no_peer():
    cell = {
        s: {"system": s, "p50_us": us} for s, us in (("dpiframe", 3.0), ("dpiframe-in-place", 2.0), ("compile-mapped", 4.0))
    }
    assert best_peer(cell)["system"] == "compile-mapped"


def test_every_architecture_must_reach_the_mean_by_itself():
    assert verdict(EACH, measured()).met is True
    one_slow = verdict(EACH, measured(lambda model, batch: 1.4 if model == "autoint" else 2.0))
    assert one_slow.met is False
    assert one_slow.figure.startswith("least mean 1.40x (autoint), least 1.40x (autoint B=1), 91 of 91 cells")
    # DIN's two lengths are one architecture
    halves = {"din-50": 1.2, "din-200": 2.0}
    assert verdict(EACH, measured(lambda model, batch: halves.get(model, 2.0))).met is True


def test_no_cell_of_any_architecture_may_be_slower_than_its_peer():
    found = verdict(EACH, measured(lambda model, batch: 0.99 if (model, batch) == ("dlrm", 64) else 2.0))
    assert found.met is False
    assert "least 0.99x (dlrm B=64)" in found.figure


def test_architectures_that_lack_leave_the_aim_open_and_the_four_alone_do_not_raise_it():
    assert verdict(EACH, measured(models=PAPER_MODELS)) == NOTHING
    assert verdict(EACH, measured(models=[*PAPER_MODELS, "dlrm"])).met is None
    assert verdict(EACH, measured(lambda *at: 1.4, models=["dlrm"])).met is False  # its own cells are all there


def test_mlperfs_rate_is_that_of_the_best_number_of_lanes_and_large_batches():
    def saturated(batch, lanes, rate, p99=150.0):
        return record("mlperf", "dpiframe", model="mlperf", batch=batch, precision="bf16", cell={"ids": "zipf", "lanes": lanes},
                      times=Times(100.0, p99, 9), rows_per_s=rate)  # fmt: skip

    rate, p99 = "MLPerf's DLRM-DCNv2, pairs a second, bf16, saturated", "MLPerf's DLRM-DCNv2, 1,024 pairs, bf16, p99"
    found = Results(
        {}, (saturated(8192, 1, 11e6), saturated(8192, 2, 13.3e6), saturated(8192, 4, 12e6), saturated(1024, 1, 99e6))
    )
    assert (verdict(rate, found).figure, verdict(rate, found).met) == ("13.3 M (2 lanes)", True)
    assert (verdict(p99, found).figure, verdict(p99, found).met) == ("150 us", True)
    slow = Results({}, (saturated(8192, 1, 13.1e6), saturated(1024, 1, 1e6, 200.0)))
    assert (verdict(rate, slow).met, verdict(p99, slow).met) == (False, False)
    assert verdict(rate.replace("bf16", "fp8"), found) == verdict(p99, Results({}, ())) == NOTHING


@pytest.mark.parametrize(("slowest", "met"), [(1.3, True), (1.29, False)])
def test_bf16_is_held_against_our_own_tf32_where_products_rule(slowest, met):
    cells = [c for c in every_cell(["xdeepfm", "mlperf", "din-50", "din-200"]) if c[1] >= 1024]
    times = {cell: slowest if cell == cells[-1] else 1.5 for cell in cells}
    records = [r for c, t in times.items() for r in (latency("dpiframe", 10 * t, *c), latency("dpiframe", 10, *c, "bf16"))]
    found = verdict(OWN, Results({}, tuple(records)))
    assert (found.met, found.figure.endswith("(16 of 16 cells)")) == (met, True)
    assert verdict(OWN, Results({}, tuple(r for r in records if r["batch"] == 1024))).met is not True


def test_every_architecture_has_a_row_with_its_mean_and_its_worst_cell():
    slow = {("autoint", 64): 0.9, ("din-200", 1): 1.1}
    tf32 = measured(lambda *at: slow.get(at, 2.0)).records
    bf16 = [r | {"precision": "bf16", "p50_us": r["p50_us"] / 2} for r in tf32 if r["batch"] > 1]
    rows = architectures(Results({}, (*tf32, *bf16)))
    assert len(rows) == 2 + len({architecture_of(m) for m in MODEL_TITLES})
    assert f"| AutoInt | {(2**4 * 0.9) ** (1 / 5):.2f}x (least 0.90x: autoint B=64) |" in rows[-3]
    (din,) = [row for row in rows if row.startswith("| DIN |")]
    assert "(least 1.10x: din-200 B=1) | 2.00x (least 2.00x: din-50 B=64; 24 of 26 cells) | 2.00x (least 2.00x) |" in din
    assert architectures(Results({}, tuple(bf16)))[2].endswith("|  |")  # no tf32 of ours


def stored_of_the_four():
    """What is stored of the H200, without the other models."""
    found = Results.read(RESULTS / "h200")
    records = tuple(r for r in found.records if not r["model"] or r["model"] in PAPER_MODELS or r["suite"] not in NEW)
    return Results({name: found.runs[name] for name in {r["file"] for r in records}}, records)


def test_other_models_stand_in_a_table_of_their_own_and_in_no_claim_about_the_four():
    h200 = stored_of_the_four()
    new = [r for r in measured().records if r["model"] not in PAPER_MODELS]
    more = Results({**h200.runs, "new.json": RUN}, (*h200.records, *({**r, "file": "new.json"} for r in new)))
    before, after = performance.models(h200, "tf32"), performance.models(more, "tf32")
    assert after[: len(before)] == before
    table = "\n".join(after[len(before) :])
    assert "| candidates | 1 | 64 | 256 | 1024 | 4096 | over the peer |" in table
    assert "| DIN, 50 items, 32 contexts |  | **10.0** (2.00x) |" in table
    assert "| MLPerf's DLRM-DCNv2 | **10.0** (2.00x) |" in table
    assert speed_chart.speeds(more) == speed_chart.speeds(h200)
    assert pages.summary(more, more, "") == pages.summary(h200, more, "")
    old = [a.what for a in GPU_AIMS if a.judge(h200) != NOTHING]
    assert [w for w in old if verdict(w, more) != verdict(w, h200)] == []


def partial():
    """As a short run leaves them: peers at 1,024 rows alone, of some models; eager here and there; one cell without us."""
    for r in measured(lambda model, batch: 1.3).records:
        is_peer, contexts = r["system"].startswith("compile"), r["cell"].get("contexts", 1)
        peered = r["batch"] == 1024 and contexts == (4 if r["model"] in WITH_CONTEXTS else 1) and r["model"] != "mlperf"
        dropped = (r["system"], r["model"], r["batch"]) == ("dpiframe", "masknet", 64)
        if r["model"] not in PAPER_MODELS and not dropped and (not is_peer or peered):
            yield r | ({"products": "ATEN"} if is_peer else {})


def test_cells_without_peers_stand_without_a_claim(tmp_path):
    file = ResultFile(tmp_path / "other.json", RUN)
    file.records = list(partial())
    file.write()
    text = results_page.write(tmp_path)
    results = Results.read(tmp_path)
    assert {g.batch for g in results.gains()} == {1024}
    assert "| din-50, 4 contexts | 1024 | 10.0 (10.0) | 900 (900) | 14.0 (14.0) | 13.0 (13.0) |  | 1.30x |" in text
    assert "| din-50 | 1024 | 10.0 (10.0) | 900 (900) |  |  |  |  |" in text
    assert "| masknet | 64 |  | 900 (900) |  |  |  |  |" in text
    found = verdict(EACH, results)
    assert (found.met, found.figure.split(", ")[-1]) == (None, "10 of 91 cells")
    *_, note, _, head, _, first = performance.models(results, "tf32")[:5]
    assert note.startswith("Other models. In brackets: over the strongest peer, where")
    assert note.endswith("Peers that chose among cuBLAS's products alone; Inductor's whole search may find faster ones.")
    assert head == "| candidates | 1 | 64 | 256 | 1024 | 4096 | over the peer |"
    rows = "\n".join(performance.models(results, "tf32"))
    assert "| xDeepFM | **10.0** | **10.0** | **10.0** | **10.0** (1.30x\\*) | **10.0** | 1.30x |" in rows
    assert "| MaskNet | **10.0** |  | **10.0** | **10.0** (1.30x\\*) | **10.0** | 1.30x |" in rows
    assert "| MLPerf's DLRM-DCNv2 | **10.0** | **10.0** | **10.0** | **10.0** | **10.0** |  |" in rows
    assert "| DIN, 50 items, 32 contexts |  | **10.0** | **10.0** | **10.0** | **10.0** |  |" in rows
    assert first.startswith("| DCN-V2 stacked |")


def test_all_pages_build_with_a_file_of_partial_records_beside_the_stored_ones():
    h200 = stored_of_the_four()
    more = tuple({**r, "file": "other.json", "system": title(r)} for r in partial())
    stored = {p.name: Results.read(p) for p in RESULTS.iterdir() if p.is_dir()} | {"h200": h200}
    both = Results({**h200.runs, "other.json": RUN}, (*h200.records, *more))
    before, after = pages.parts(stored, ""), pages.parts(stored | {"h200": both}, "")
    changed = [
        name for name in before if before[name] != after[name] and name != "missed"
    ]  # which aims of all architectures are in
    assert changed == ["models-tf32", "architectures", "imported"]
    assert after["models-tf32"][: len(before["models-tf32"])] == before["models-tf32"]
    text = results_page.page(both)
    assert text.index("| wide_deep | 1 |") < text.index("| dcnv2-stacked | 1 |")


def test_a_machines_page_and_pictures_hold_all_models(tmp_path):
    file = ResultFile(tmp_path / "latency-tf32.json", RUN)
    file.records = list(measured().records)
    file.write()
    own = {"largest_table_rows": 40_000_000, "table_bytes": 52_300_000_000, "sm_active": 0.9, "sm_occupancy": None}
    shares = dict.fromkeys(("dram_active", "kernel_share", "kernel_union"))
    ResultFile(tmp_path / "mlperf.json", RUN).add(
        record("mlperf", "dpiframe", model="mlperf", batch=8192, precision="bf16", cell={"ids": "zipf", "lanes": 2},
               times=Times(800, 900, 9), rows_per_s=12_500_000, **own, **shares)
    )  # fmt: skip
    text = results_page.write(tmp_path)
    assert "| din-200, 4 contexts | 1024 | 10.0 (10.0) | 900 (900) | 21.0 (21.0) | 20.0 (20.0) |  | 2.00x |" in text
    assert "the largest of 40,000,000 rows, 52.3 GB in all" in text
    assert "| mlperf | bf16 | dpiframe | 8192 | 2 | 12.50 | 800 (900) | 90.0% |" in text
    assert (tmp_path / "latency-tf32.png").exists()
    assert results_page.page(Results.read(tmp_path)) == text


def test_a_model_that_tf32_is_too_far_off_for_is_told_at_fp32():
    times = Times(100, 120, 9)
    common = {"batch": 256, "times": times, "max_abs_err": 0.0, "program": "breadth_first"}
    of = {"CCPM": "fp32", "FGCNN": "tf32"}
    found = [record("imported", "dpiframe", model=m, precision=p, **common) for m, p in of.items()]
    rows = {line.split(" | ")[1]: line.split(" | ")[4] for line in imported({"H100": Results({}, tuple(found))})[2:]}
    assert (rows["CCPM"], rows["FGCNN"], rows["DSSM"].strip()) == ("streams, fp32", "streams", "")
