"""The suites on a GPU, tiny: captured graphs, device time, counters, and the plain gather."""

import pytest
import torch

from benchmarks.apart.gpu_turn import GpuTurn, ReplayedChoices
from benchmarks.device import ablation, embedding, floor, latency, tiers, utilisation
from benchmarks.systems.embedding_cells import MIXED, Cell
from benchmarks.systems.gather import UNROLLS, Gather
from benchmarks.systems.names import OURS
from benchmarks.systems.systems import golden, locked_block
from benchmarks.systems.torch_calls import as_device_memory
from benchmarks.timing import Captured
from benchmarks.workloads.blocks import drawn_blocks
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from tests.benchmarks.tiny import cells, unexpected

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("unroll", UNROLLS)
@pytest.mark.parametrize("dim", [4, 16, 128])
def test_the_gather_copies_rows(dim, unroll):
    table = torch.randn(1000, dim, device=GPU)
    for n in (1, 127, 4099):
        ids = torch.randint(0, 1000, (n,), device=GPU, dtype=torch.int32)
        out = torch.full((n, dim), torch.nan, device=GPU)
        Gather(dim * 4, unroll)(table, ids, out)
        assert torch.equal(out, table[ids])


def test_captured_work_is_replayed_on_what_its_buffers_hold():
    x, y = torch.ones(64, device=GPU), torch.zeros(64, device=GPU)
    graph = Captured(lambda: y.copy_(x * 2))
    x.fill_(3)
    torch.cuda.synchronize()  # the graph has a stream of its own
    graph()
    assert torch.equal(y, torch.full_like(y, 6))
    assert graph.device_us() > 0
    graph.close()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_latency_tells_our_device_time(precision):
    names = (*OURS, "eager", "stacked-eager")
    found = list(latency.run(cells(["deepfm", "dcnv2"], [precision], [3], GPU), names))
    assert [r["system"] for r in found] == [*names, *names]
    assert all((r["device_us"] is not None) == (r["system"] in OURS) for r in found)


def test_a_locked_block_is_read_in_place():
    (w,) = cells(["deepfm"], ["tf32"], [4096], GPU).workloads()
    engine = Engine(w.bundle(golden(w)), "cuda:0", "tf32", EngineOptions(max_batch_rows=4096, buckets=(64, 4096), lanes=1))
    engine.warmup()
    (block,), staged = drawn_blocks(w.schema, 4096, 1), engine._pool.lanes[0]._staging.block.candidate_ids
    staged[:] = 255
    scores = engine.submit(locked_block(engine, block))
    assert (staged == 255).all()
    assert (engine.submit(block) == scores).all()
    assert not (staged == 255).all()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["xdeepfm", "dlrm", "din-50", "mlperf", "autoint"])
def test_models_with_numbers_bags_and_histories_are_measured_beside_their_eager_peers(model):
    names = ("dpiframe", "eager", "stacked-eager")
    found = list(latency.run(cells([model], ["bf16"], [33], GPU, contexts=(1, 4)), names))
    assert {r["system"] for r in found} == set(names)
    assert {r["cell"].get("contexts", 1) for r in found} == ({1, 4} if model.startswith("din") else {1})


def test_pinned_memory_is_read_and_written_by_kernels_in_place():
    pinned, out = torch.arange(100, dtype=torch.int32, pin_memory=True), torch.zeros(100, dtype=torch.int32, pin_memory=True)
    here, there = as_device_memory(pinned), as_device_memory(out)
    assert (here.device, there.device) == (GPU, GPU)
    graph = Captured(lambda: torch.add(here, 1, out=there), holds=(pinned, out))
    pinned += 5
    graph()
    assert torch.equal(out, torch.arange(100, dtype=torch.int32) + 6)
    graph.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("system", ["compile", "compile-captured", "compile-mapped", "fbgemm", "fbgemm-captured"])
def test_compiled_peers_compute_the_source_model(system):
    if system.startswith("fbgemm"):
        pytest.importorskip("fbgemm_gpu")
    run = latency.run(cells(["deepfm"], ["bf16"], [16], GPU), [system])
    assert [(r["system"], r["device_us"] is not None) for r in run] == [(system, system.endswith(("captured", "mapped")))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["din-50", "mlperf", "dlrm", "xdeepfm"])
def test_mapped_peers_compute_models_with_numbers_bags_and_histories(model):
    found = list(latency.run(cells([model], ["bf16"], [16], GPU, contexts=(1, 4)), ["compile-mapped"]))
    assert {r["inputs"] for r in found} <= {"in_place", "by_a_kernel"}
    assert len(found) == (2 if model == "din-50" else 1)


def test_lookups_of_every_dtype_are_right_before_they_are_timed():
    sizes = [Cell(33, 16, 5, dtype=t) for t in ("float32", "float16", "int8")] + [
        Cell(33, 8, 3, bag=4),
        Cell(512, 16, 2, large=True),
    ]
    names = ("dpiframe", "eager", "stacked-eager", "gather")
    found = list(embedding.run(sizes, names, GPU, unexpected, seconds=0.005, seed=0, max_rows=200))
    ours = ["dpiframe", "dpiframe-pinned", "eager", "stacked-eager", "stacked-captured"]
    assert [r["system"] for r in found] == [*ours * 5, *(f"gather-{u}" for u in UNROLLS)]
    mixed = [Cell(33, 64, 26, MIXED, dtype=t) for t in ("float16", "int8")]
    gathered = list(embedding.run(mixed, names, GPU, unexpected, seconds=0.005, seed=0, max_rows=200))
    assert [r["system"] for r in gathered] == [*ours[:2], *(f"gather-{u}" for u in UNROLLS)] * 2
    assert all((r["device_us"] is None) == (r["system"] in ("eager", "stacked-eager")) for r in found)


def test_the_other_suites_run():
    stages = list(ablation.run(["ablation", "first_op"], cells(["dcnv2"], ["tf32"], [8], GPU, seconds=0.3)))
    assert {r["suite"] for r in stages} == {"ablation", "first_op"}
    machine, cell = floor.run(cells(["dcn"], ["bf16"], [8], GPU, seconds=0.3), gemm=512)
    assert min(machine["launch_us"], machine["polled_us"]) > 0
    assert {"step_us", "trip_us"} <= machine.keys()  # differences of two times: beside other work they may be below 0
    assert cell["launches"] >= 2
    assert cell["chain_floor_us"] > cell["floor_us"]
    assert len(cell["kernels"]) >= 2
    assert 0 < sum(us for _, us in cell["kernels"]) < cell["p99_us"]
    assert cell["ratio"] > 0
    sweep = cells(["dcn"], ["tf32"], [8], GPU, seconds=0.3)
    busy = list(utilisation.run(sweep, ["dpiframe", "eager"], lanes=(1, 2)))
    assert [r["cell"]["lanes"] for r in busy] == [1, 2, 1]
    assert all(0 < r["kernel_union"] <= r["kernel_share"] <= 4 for r in busy)


def test_lookups_over_both_memories_are_measured_beside_their_peers():
    sets = [tiers.Tables(tables=3, rows=500, dim=16, zipf=1.1)]
    found = list(tiers.run(sets, [1, 0.5], [5], [1, 4], tiers.SYSTEMS, GPU, unexpected, seconds=0.01, seed=0))
    assert [r["system"] for r in found] == 2 * ["replicated", "one-sided", "host", "cpu-gather", "files"]
    assert [r["cell"]["share"] for r in found] == 2 * [1.0, 0.5, 0.0, 0.0, 0.5]
    assert all(r["device_us"] for r in found if r["system"] not in ("cpu-gather", "files"))


def test_a_choice_of_inductors_is_timed_by_replays_if_it_can_be_captured(tmp_path):
    asked = []

    def own(_, choice, **kwargs):
        asked.append(choice)
        return 7.0

    timing = ReplayedChoices(GpuTurn(tmp_path / "gpu", torch.cuda.synchronize), own).timing()
    x = torch.ones(1 << 20, device="cuda")

    def choice():
        x.mul_(1.0)

    with torch.cuda.stream(torch.cuda.Stream()):
        assert all(0 < timing(None, choice) < 1 for _ in range(3))
        assert asked == []
        assert timing(None, choice, return_mode="all") == 7.0
        assert timing(None, asked.clear) == 7.0  # launches nothing here
    assert timing(None, choice) == 7.0  # on a stream that nobody captures
    assert asked == [asked.clear, choice]
