"""Every suite on tiny models on the CPU: it measures what it says, and refuses to time what is wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.device import (
    ablation,
    chain_steps,
    embedding,
    floor,
    latency,
    precision,
    promotion,
    raw_values,
    utilisation,
    warmup,
)
from benchmarks.device.activity import GpuCounters, union
from benchmarks.serving import offline_scoring
from benchmarks.systems import embedding_cells, lookups
from benchmarks.systems import systems as known
from benchmarks.systems.embedding_cells import MIXED, Cell, sweep
from benchmarks.systems.fbgemm import TableBatch, require
from benchmarks.systems.launches import dependent_launches
from benchmarks.systems.stages import STAGES
from benchmarks.workloads.blocks import _zipf_cdf, drawn_blocks, wide_ids
from benchmarks.workloads.workload import schema_of
from deployments.demo.export import build_demo_bundle
from deployments.demo.train import TrainingPlan
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.build import build_graph
from kernels.cpu.dense import has_bf16
from tests.benchmarks.tiny import SIZES, cells, make, unexpected

pytestmark = pytest.mark.bulk

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def test_latency_measures_every_system_of_a_cell_against_the_source_model():
    names = ("dpiframe", "dpiframe-in-place", "eager", "stacked-eager")
    found = list(latency.run(cells(["dcn", "deepfm"], ["fp32", "tf32"], [1, 5], CPU), names))
    assert [(r["model"], r["batch"], r["system"]) for r in found] == [
        (m, b, s) for m in ("dcn", "deepfm") for b in (1, 5) for s in names
    ]
    assert all(r["p50_us"] > 0 and r["calls"] >= 20 and r["max_abs_err"] <= 1e-5 and r["device_us"] is None for r in found)


def test_latency_gives_our_ratio_to_the_floor_from_the_same_calls():
    machine = floor.Machine(0.0, 0.0, 1e10, 1e10, {"fp32": 1e10})
    eager, ours, ratio = latency.run(cells(["dcn"], ["fp32"], [2], CPU), ("eager", "dpiframe"), machine=machine)
    assert [r["suite"] for r in (eager, ours, ratio)] == ["latency", "latency", "floor"]
    assert ratio["p50_us"] == ours["p50_us"]
    assert ratio["ratio"] == pytest.approx(ours["p50_us"] / ratio["floor_us"], rel=0.02, abs=0.001)


def test_a_system_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    build, failures = known.build, []

    def broken(name, w, rows, precision, device, **options):
        if name == "eager":
            return known.System(lambda block: np.full((block.rows, 1), 0.25, np.float32))
        return build(name, w, rows, precision, device, **options)

    monkeypatch.setattr(known, "build", broken)
    names = ("eager", "nonsense", "dpiframe")
    sweep = cells(["dcn"], ["fp32"], [3], CPU, failed=lambda what, error: failures.append((what, str(error))))
    assert [r["system"] for r in latency.run(sweep, names)] == ["dpiframe"]
    assert [what for what, _ in failures] == ["eager dcn fp32 B=3", "nonsense dcn fp32 B=3"]
    assert "got scores off by" in failures[0][1]
    assert "system: got 'nonsense', expected one of dpiframe, dpiframe-in-place, eager" in failures[1][1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_peers_compute_the_source_model():
    found = list(latency.run(cells(["dcnv2"], ["fp32"], [3], CPU), ["compile"]))
    assert [(r["batch"], r["max_abs_err"] <= 1e-5) for r in found] == [(3, True)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fbgemm_computes_the_source_model():
    pytest.importorskip("fbgemm_gpu")
    run = latency.run(cells(["deepfm", "dcn"], ["fp32"], [3], CPU), ["fbgemm"])
    assert [r["max_abs_err"] <= 1e-5 for r in run] == [True, True]


@pytest.mark.parametrize("bag", [1, 3])
def test_fbgemm_int8_rows_come_out_within_their_step(bag):
    pytest.importorskip("fbgemm_gpu")
    cell = Cell(5, 8, 3, bag, dtype="int8")
    (r,) = embedding.run([cell], ["fbgemm"], CPU, unexpected, seconds=0.01, seed=0, max_rows=9)
    assert 0 < r["max_abs_err"] < 0.01 * bag


def test_without_fbgemm_its_systems_say_what_is_missing(monkeypatch):
    monkeypatch.setattr("benchmarks.systems.fbgemm.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="fbgemm: got no module fbgemm_gpu, expected it on the path"):
        require()
    with pytest.raises(ModuleNotFoundError, match="fbgemm: got no module"):
        TableBatch([torch.zeros(2, 4)], 1, torch.float32)


def test_the_sweep_moves_one_axis_at_a_time_and_has_the_cells_that_the_aims_name():
    cells, centre = sweep(["float32", "float16", "int8"]), Cell()
    assert len(set(cells)) == len(cells)
    for dtype in ("float32", "float16"):
        own = [c for c in cells if c.dtype == dtype]
        assert {c.batch for c in own} >= {1, 1024, 4096, 16384, 65536}
        assert {(c.batch, c.dim) for c in own if c.large} == {(65536, 16), (65536, 128)}
        assert {c.batch for c in own if c.dim == 128 and not c.large} >= {1024, 4096, 16384}
    mixed = [c for c in cells if c.bag == MIXED]
    assert {(c.dtype, c.dim, c.batch) for c in mixed} == {
        (t, d, b) for t in ("float16", "int8") for d in (64, 128) for b in (1024, 4096, 16384)
    }
    assert all(sum(c.bags) == 214 and sum(c.sizes()) * c.row_bytes > 1e9 for c in mixed)
    for c in cells:
        if c.bag == MIXED:
            continue
        moved = [k for k in ("batch", "dim", "fields", "bag", "ids") if getattr(c, k) != getattr(centre, k)]
        assert c.large or len(moved) <= 1 or moved == ["batch", "dim"], c
    assert all(sum(c.sizes()) * c.row_bytes > 5e9 for c in cells if c.large)


def test_bytes_of_a_lookup_are_ids_rows_and_outputs():
    assert Cell(2, 16, 3, bag=4, dtype="float32").bytes_moved == 2 * 3 * (4 * (4 + 64) + 64)
    assert Cell(2, 16, 3, dtype="int8").bytes_moved == 2 * 3 * (4 + 16 + 32)
    mixed = Cell(2, 16, 3, MIXED, dtype="int8")
    assert mixed.bags == (3, 2, 1)
    assert (mixed.bytes_moved, mixed.gathered_bytes) == (2 * (6 * (4 + 16) + 3 * 32), 2 * 6 * (4 + 2 * 16))


def test_every_lookup_gives_the_reference_rows():
    cells = [
        Cell(7, 8, 4),
        Cell(7, 4, 4, bag=3),
        Cell(300, 8, 2, ids="uniform", dtype="float16"),
        Cell(7, 8, 4, 3, dtype="float16"),
    ]
    found = list(
        embedding.run(cells, ("dpiframe", "eager", "stacked-eager"), CPU, unexpected, seconds=0.005, seed=0, max_rows=40)
    )
    assert [r["system"] for r in found] == ["dpiframe", "eager", "stacked-eager"] * len(cells)
    one_hot = [r for r in found if r["cell"]["bag"] == 1]
    assert [r["max_abs_err"] for r in one_hot] == [0.0] * len(one_hot)
    assert all(r["cell"]["max_rows"] == 40 for r in found)
    (mixed,) = embedding.run([Cell(7, 8, 26, MIXED)], lookups.SYSTEMS, CPU, unexpected, seconds=0.005, seed=0, max_rows=40)
    assert (mixed["system"], mixed["cell"]["bag"]) == ("dpiframe", MIXED)


def test_a_lookup_that_is_wrong_in_one_value_is_not_timed(monkeypatch):
    right, failures = lookups._per_table, []

    def wrong(task):
        return lambda i: right(task)(i).index_fill(0, torch.tensor([6]), 1.0)

    monkeypatch.setattr(lookups, "_per_table", wrong)
    run = embedding.run(
        [Cell(7, 8, 2)], ["eager"], CPU, lambda what, error: failures.append(str(error)), seconds=0.01, seed=0, max_rows=9
    )
    assert list(run) == []
    assert "got values off by" in failures[0]


def test_both_stage_suites_run_their_stages_side_by_side():
    run = ablation.run(["ablation", "first_op"], cells(["deepfm"], ["fp32"], [1, 4], CPU))
    found = [(r["suite"], r["batch"], r["system"]) for r in run if r["max_abs_err"] <= 1e-5]
    stages = {"ablation": [s.name for s in STAGES], "first_op": [s.first_op for s in STAGES if s.first_op]}
    assert found == [(suite, b, name) for b in (1, 4) for suite, names in stages.items() for name in names]


def test_each_stage_adds_to_the_one_before_it():
    options = [s.options for s in STAGES[1:]]
    assert STAGES[0].options is None
    assert [o.capture for o in options] == sorted(o.capture for o in options)
    assert all(set(a.fusion) <= set(b.fusion) for a, b in pairwise(options))
    assert all(a != b for a, b in pairwise(options))


def test_saturated_lanes_count_the_rows_of_all_callers():
    run = utilisation.run(cells(["dcn"], ["fp32"], [4], CPU, seconds=0.1), ["dpiframe", "eager"], lanes=(1, 2))
    found = [(r["system"], r["cell"]["lanes"], r["rows_per_s"] > 0, r["sm_active"]) for r in run]
    assert found == [("dpiframe", 1, True, None), ("dpiframe", 2, True, None), ("eager", 1, True, None)]


def test_a_caller_that_fails_fails_the_loop():
    def fail(i):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        utilisation.saturated(fail, 2, 5.0, CPU)


def test_counters_that_a_machine_lacks_are_none():
    with GpuCounters(CPU) as counters:
        pass
    assert set(counters.shares.values()) == {None}


def test_the_union_of_intervals_counts_overlaps_once():
    assert union([(0, 2), (1, 3), (5, 6), (5.5, 5.7), (6, 7)]) == 5
    assert union([]) == 0


def test_the_floor_adds_up_what_must_move_and_be_computed():
    machine = floor.Machine(9.5, 8.0, 4e12, 5e10, {"bf16": 8e14})
    assert floor.Needs(4e6, 5e4, 8e8).floor_us(machine, "bf16") == pytest.approx(8.0 + 1.0 + 1.0 + 1.0)


def test_the_floor_of_a_chain_adds_a_trip_and_a_step_for_each_launch_but_the_first():
    steps = chain_steps.ChainSteps(1.5, 2.0)
    assert steps.of(1) == 2.0
    assert steps.of(4) == 2.0 + 3 * 1.5


def test_dependent_launches_are_the_longest_chain_of_what_runs():
    w = make("dcn", CPU, seed=0)  # lookup, cross network and MLP side by side, head
    graph = fuse(build_graph(w.architecture, w.schema))
    before = graph.predecessors()

    def length(name):
        return 1 + max((length(p) for p in before[name]), default=0)

    assert dependent_launches(graph) == max(map(length, before))
    waves = group_waves(place(graph, 8))
    assert 2 <= dependent_launches(waves) < dependent_launches(graph) + 1


def test_a_model_needs_its_distinct_rows_its_weights_and_its_products():
    w = make("deepfm", CPU, seed=0)
    (block,) = drawn_blocks(w.schema, 4, 1)
    ids = np.zeros_like(wide_ids(block))
    ids[0, 0] = 3
    block.set_ids("candidate_ids", ids)
    wide_ids.cache_clear()
    needs = floor.needs_of(w, [block], "bf16")
    width, hidden = 8 * len(SIZES), (1024, 512, 256)
    weights = sum(a * b for a, b in zip((width, *hidden), (*hidden, 1), strict=True))
    biases = sum(hidden) + 1
    assert needs.operations == 2 * 4 * weights
    assert needs.device_bytes == (len(SIZES) + 1) * (8 + 1) * 4 + 2 * (weights + biases)
    assert needs.host_bytes == 4 * (block.layout.candidate_ids.nbytes + 4)


def test_floor_measures_the_machine_first_and_then_each_cell():
    precisions = ["fp32", "bf16"] if has_bf16() else ["fp32"]
    machine, *ratios = floor.run(cells(["dcn"], precisions, [1, 4], CPU), gemm=64)
    assert machine["operations_per_s"]["fp32"] > 0
    assert machine["copy_bytes_per_s"] > 0
    for r in ratios:
        assert r["ratio"] == pytest.approx(r["p50_us"] / r["floor_us"], rel=0.02, abs=0.001)  # it is rounded
    assert [r["batch"] for r in ratios if r["precision"] == "fp32"] == [1, 4]


def test_zipf_ids_follow_the_power_law_exactly():
    assert _zipf_cdf(2, 1.1)[0] == pytest.approx(1 / (1 + 2**-1.1))
    schema = schema_of((2,), 4)
    (block,) = drawn_blocks(schema, 20_000, 1, seed=1)
    share = float((wide_ids(block) == 0).mean())
    assert abs(share - 1 / (1 + 2**-1.1)) < 4 * 0.5 / 20_000**0.5


def test_ids_of_every_feature_lie_in_its_table():
    for skew in ("zipf", "uniform"):
        (block,) = drawn_blocks(schema_of(SIZES, 4, bag=3), 200, 1, skew=skew)
        by_feature = wide_ids(block).reshape(200, len(SIZES), 3)
        assert (by_feature.min((0, 2)) >= 0).all()
        assert (by_feature.max((0, 2)) < SIZES).all()


def naive_tau(a, b):
    """Kendall 1945: concordant minus discordant pairs over the geometric mean of the pairs that each does not tie."""
    pairs = [(np.sign(a[i] - a[j]), np.sign(b[i] - b[j])) for i in range(len(a)) for j in range(i)]
    return sum(x * y for x, y in pairs) / (sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs)) ** 0.5


def test_kendalls_tau_counts_pairs_and_ties():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 9, 40).astype(np.float32)
    b = (a + rng.integers(0, 9, 40)).astype(np.float32)
    assert precision.kendall_tau(a, b, CPU) == pytest.approx(naive_tau(a, b))
    assert precision.kendall_tau(a, a, CPU) == pytest.approx(1.0)
    assert precision.kendall_tau(a, -a, CPU) == pytest.approx(-1.0)


def test_precision_scores_the_rows_that_the_demo_held_out(tmp_path):
    plan = TrainingPlan(hidden_units=(8,), epochs=1, batch_rows=512)
    build_demo_bundle(tmp_path / "demo", rows=12_000, seed=3, progress=False, plan=plan)
    bundle = read_bundle(tmp_path / "demo")
    data = precision.held_out(bundle, tmp_path / "held-out.npz", rows=12_000, seed=3)
    again = precision.held_out(bundle, tmp_path / "held-out.npz", rows=1, seed=1)  # from the file
    assert data.block.rows == len(data.clicks) == 1200
    np.testing.assert_array_equal(data.block.buffer, again.block.buffer)
    np.testing.assert_array_equal(data.clicks, again.clicks)
    first, *_ = precision.run(bundle, again, ["fp32"], CPU, unexpected, seconds=0.01)
    assert first["auc"] == pytest.approx(bundle.manifest.provenance.metrics["auc"], abs=1e-6)
    assert (first["max_abs_err"], first["auc_delta"], first["kendall_tau"]) == (0.0, 0.0, pytest.approx(1.0))


def test_the_command_writes_a_suites_file_and_the_report_beside_it(tmp_path, monkeypatch):
    """The suite in this process, without its widest batches; the report as a user starts it."""
    monkeypatch.setattr(embedding_cells, "WIDE_BATCHES", ())
    out = tmp_path / "embedding.json"
    options = (
        "--device cpu --max-rows 50 --batches 3,1024 --dtypes float32 --only sweep --seconds 0.002 --systems dpiframe,eager"
    )
    done = CliRunner().invoke(app, ["embedding", *options.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    stored = json.loads(out.read_text())
    assert {r["batch"] for r in stored["records"]} == {3, 1024}
    assert {r["system"] for r in stored["records"]} == {"dpiframe", "eager"}
    assert stored["run"]["gpu"] is None
    report = [sys.executable, "-m", "benchmarks", "report", str(tmp_path)]
    assert "## embedding" in subprocess.run(report, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_gather_compiles_for_every_row_size():
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    code = (ROOT / "benchmarks" / "systems" / "gather.cu").read_text()
    for vectors, unroll in ((1, 1), (4, 4), (32, 8)):
        macros = [("VECTORS", str(vectors)), ("UNROLL", str(unroll))]
        options = core.ProgramOptions(std="c++17", arch="sm_90", define_macro=macros)
        assert b"gather" in bytes(core.Program(code, code_type="c++", options=options).compile("cubin").code)


def test_warmup_starts_a_model_twice_in_processes_of_their_own():
    run = warmup.run(["dcn"], ["fp32", "tf32"], CPU, unexpected, max_batch_rows=64, seed=0, sizes=SIZES)
    cold, again = run
    assert [r["cell"]["start"] for r in (cold, again)] == ["cold", "again"]
    assert all(r["seconds"] > 0 and 0 <= r["max_abs_err"] <= 1e-5 for r in (cold, again))


def test_offline_scoring_is_measured_file_to_file_and_checked_against_the_eager_script():
    found = list(offline_scoring.run([4], 700, CPU, unexpected, repeats=2, seed=0, sizes=SIZES))
    assert [r["system"] for r in found] == ["eager", "dpiframe-one-thread", "dpiframe"]
    assert all(r["rows_per_s"] > 0 and len(r["rows_per_s_runs"]) == 2 and r["max_abs_err"] < 1e-6 for r in found)
    assert all(r["cell"]["fields"] == len(SIZES) and r["cell"]["rows"] == 700 for r in found)


def test_latency_has_a_cell_for_each_number_of_contexts_that_a_batch_can_have():
    sweep = cells(["din-50", "dlrm"], ["fp32"], [1, 6], CPU, contexts=(1, 4))
    found = list(latency.run(sweep, ("dpiframe", "eager", "stacked-eager")))
    assert all(r["max_abs_err"] <= 1e-5 for r in found)
    measured = [(r["model"], r["batch"], r["cell"].get("contexts")) for r in found if r["system"] == "dpiframe"]
    assert measured == [("din-50", 1, 1), ("din-50", 6, 1), ("din-50", 6, 4), ("dlrm", 1, None), ("dlrm", 6, None)]


def test_a_sweep_that_caps_tables_says_so_in_its_cells():
    sweep = replace(cells(["dlrm"], ["fp32"], [2], CPU), most_rows=5)
    (r,) = latency.run(sweep, ["eager"])
    assert (r["cell"]["max_rows"], r["largest_table_rows"]) == (5, 5)


def test_mlperfs_shape_is_saturated_in_a_suite_of_its_own():
    sweep = cells(["mlperf"], ["fp32"], [8], CPU, seconds=0.05)
    found = list(utilisation.run(sweep, ["dpiframe", "eager"], lanes=(1,), suite="mlperf"))
    assert [(r["suite"], r["system"], r["rows_per_s"] > 0) for r in found] == [
        ("mlperf", "dpiframe", True), ("mlperf", "eager", True)
    ]  # fmt: skip
    assert {r["largest_table_rows"] for r in found} == {max(SIZES)}
    assert all(r["kendall_tau"] > 0.999 and abs(r["auc_delta"]) < 1e-6 and 0.3 < r["auc"] < 0.9 for r in found)


def test_fbgemm_and_the_floor_refuse_a_model_that_they_are_not_written_for():
    w = make("dlrm", CPU, seed=0)
    with pytest.raises(ValueError, match=r"^fbgemm: got dlrm, expected one of Wide&Deep, DeepFM, DCN and DCN-V2$"):
        known.build("fbgemm", w, 4, "fp32", CPU)
    with pytest.raises(ValueError, match=r"^floor: got dlrm, expected one of"):
        floor.needs_of(w, drawn_blocks(w.schema, 4, 1), "fp32")


@pytest.mark.slow
def test_raw_values_are_scored_and_held_against_the_module():
    def made(name, device, **size):
        return (raw_values.made if name == raw_values.TINY else make)(name, device, **size)

    found = list(raw_values.run(replace(cells(["autoint", raw_values.TINY], ["fp32"], [1, 9], CPU), make=made)))
    systems = ("eager", "dpiframe", "dpiframe-raw")
    assert [(r["model"], r["batch"], r["system"]) for r in found] == [*product(("autoint", "mlp-2"), (1, 9), systems)]
    assert all(r["p50_us"] > 0 and r["max_abs_err"] <= 1e-5 for r in found)


def test_rows_of_files_that_stay_are_read_less_in_files_and_both_systems_read_what_the_tables_have(monkeypatch):
    monkeypatch.setattr(promotion, "_ROWS", 4000)
    traffic = promotion.Traffic(zipf=1.05, held=0.02, slots=0.03, disk_us=0.0, requests=240, replan_every=30)
    found = list(promotion.run([traffic], 30, unexpected, seed=0))
    share = {(r["system"], r["cell"]["part"]): r["file_share"] for r in found}
    assert len(share) == 6
    assert share["promoted", "later"] < share["slots", "later"]
    assert {r["max_abs_err"] for r in found} == {0.0}
    assert {r["slots_mib"] for r in found} == {0.1}
