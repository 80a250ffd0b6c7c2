"""Which ways a GPU may run a model at a number of rows, and for which of them Inductor compiles."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks.workloads.compiled import compiled_model
from benchmarks.workloads.modules import FinalMLP, MaskNet
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine import cuda_lane, model_lanes, program
from dpiframe_core.engine.calibration import Calibration
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.engine.program import CudaProgram, cuda_programs
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.models.model_graph import model_graph
from tests.dpiframe_core.fusion.test_target_attention import made

CPU, FIELDS, DIM = torch.device("cpu"), 5, 8
BUCKETS = (1, 64, 1024, 2047, 2048, 4096)


def programs_of(module, monkeypatch, policy="auto"):
    """As on an H200 with a C compiler; operators that compute nothing."""
    w = compiled_model("small", CPU, module=module, sizes=[50] * FIELDS, dim=DIM)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(program, "triton_builds", lambda: True)
    monkeypatch.setattr(program, "tower_graph", lambda *given: None)
    monkeypatch.setattr(program, "CudaOperators", lambda *given, **more: SimpleNamespace(fits=lambda rows: True))
    store = SimpleNamespace(device=CPU)
    return cuda_programs(fuse(w.graph), w.schema, store, w.dense, "tf32", policy, 2)


@pytest.mark.parametrize(
    ("module", "policy", "expected"),
    [
        (MaskNet(FIELDS, DIM), "auto", []),
        (FinalMLP(FIELDS, DIM), "auto", []),
        (MaskNet(FIELDS, DIM), "regions", list(BUCKETS)),
        (FinalMLP(FIELDS, DIM), "regions", list(BUCKETS)),
    ],
)
def test_regions_are_for_what_waves_leave_or_asked_for(module, policy, expected, monkeypatch):
    regions = [p for p in programs_of(module, monkeypatch, policy) if p.name == "regions"]
    assert [b for b in BUCKETS for p in regions if p.fits(b)] == expected


def test_strict_float32_may_leave_a_found_attention_to_inductor(monkeypatch, tmp_path):
    """Few rows of wide layers are faster so: without tensor cores the kernel goes through a history slowly."""
    made(units=(7, 5))[0].write(tmp_path / "a", name="a")
    bundle, seen = read_bundle(tmp_path / "a"), {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(program, "triton_builds", lambda: True)
    monkeypatch.setattr(program, "CudaOperators", lambda *given, **more: SimpleNamespace(fits=lambda rows: True))
    store, options = SimpleNamespace(device=torch.device("cuda:0")), EngineOptions()
    for precision in ("fp32", "tf32", "bf16"):
        graph = fuse(model_graph(bundle))
        found = model_lanes._programs(bundle, bundle.golden.block, graph, store, precision, options)
        seen[precision] = {p.name: any(n.op == "attention" for n in p.graph.nodes) for p in found}
    assert seen["fp32"].pop("loose regions") is False
    assert seen["fp32"]["regions"] is True
    assert all("loose regions" not in names for names in seen.values())


def test_waves_that_leave_generic_operators_compete_with_regions_at_every_bucket():
    node = SimpleNamespace(op="aten", attrs=SimpleNamespace(members=()))
    assert program.leaves_operators(SimpleNamespace(nodes=[node]))


def compiled(buckets, known, names):
    """Which programs' regions a lane compiles."""
    did = []
    made = {}
    for name, least in names.items():
        operators = SimpleNamespace(
            fits=lambda rows, least=least: rows >= least,
            compile_regions=lambda workspace, rows, n=name: did.append((n, rows)),
        )
        made[name] = CudaProgram(name, None, None, operators, False)
    lane = CudaLane.__new__(CudaLane)
    lane.buckets, lane._calibrations, lane._programs, lane._streams, lane._workspace = buckets, known, made, [None], None
    lane._compile_regions()
    return did


def test_inductor_compiles_only_what_some_bucket_may_keep(monkeypatch):
    monkeypatch.setattr(cuda_lane.torch.cuda, "stream", lambda stream: nullcontext())
    ways = {"waves": 1, "regions": 2048}
    assert compiled((1, 1024), {}, ways) == [("waves", 1024)]
    assert compiled((1, 4096), {}, ways) == [("waves", 4096), ("regions", 4096)]
    kept = {4096: Calibration(4096, "waves", {})}
    assert compiled((1, 4096), kept, ways) == [("waves", 4096)]  # what is left to find needs no regions
    both = {1: Calibration(1, "waves", {}), 4096: Calibration(4096, "regions", {})}
    assert compiled((1, 4096), both, ways) == [("waves", 4096), ("regions", 4096)]
    assert compiled((1,), {1: both[1]}, ways) == [("waves", 1)]
