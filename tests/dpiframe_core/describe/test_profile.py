"""A profile of a real run: every operator of the plan is in it, in order, under its name."""

import json
from itertools import pairwise

import numpy as np
import pytest

from dpiframe_core.describe.profile import CAPTURED, ISSUED, profile_bundle
from dpiframe_core.engine.bucket_costs import measured_costs
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import InputError
from dpiframe_core.features.examples import sample_block
from dpiframe_core.graph.architecture import DCNv2, DeepFM
from tests.backends import BACKENDS
from tests.runner import small_bundle


@pytest.fixture(scope="module", params=["deepfm", "dcnv2"])
def bundle(request, tmp_path_factory):
    architecture = {
        "deepfm": DeepFM(hidden_units=(16, 8)),
        "dcnv2": DCNv2(cross_layers=2, hidden_units=(16, 8), structure="parallel"),
    }[request.param]
    return small_bundle(tmp_path_factory.mktemp("bundles") / "small", architecture)


@pytest.mark.parametrize("device", BACKENDS)
def test_every_step_of_the_plan_is_in_the_profile_in_order(bundle, device):
    trace = profile_bundle(bundle, 19, device, "fp32")
    engine = Engine(bundle, device, "fp32")
    program = next(p for p in engine._model.programs if p.name == trace.facts["program"])  # what its calibration found fastest
    nodes = {n.name: n for n in program.graph.nodes}
    want = [f"{nodes[s.node].module}/{s.node} ({nodes[s.node].op})" for s in program.plan.steps]
    operators = [s for s in trace.spans if s.section == ISSUED and s.row == "operators"]
    assert [s.name for s in operators] == want
    assert [s.details["plan stream"] for s in operators] == [s.stream for s in program.plan.steps]
    for before, after in pairwise(operators):
        assert before.end_us <= after.start_us
    read = json.loads(json.dumps(trace.chrome()))
    assert read["otherData"]["rows"] == 19
    assert read["otherData"]["fingerprint"] == bundle.fingerprint
    times = [e["ts"] for e in read["traceEvents"] if e["ph"] == "X"]
    assert times == sorted(times)
    assert times[0] == 0


def test_on_a_cpu_the_host_does_it_all(bundle):
    trace = profile_bundle(bundle, 5, "cpu")
    assert trace.sections == (ISSUED,)
    host = [s for s in trace.spans if s.row == "host"]
    assert [s.name for s in host] == ["prepare", "run operators", "hand over"]
    assert (trace.facts["bucket"], trace.facts["gpu"]) == (5, None)


@pytest.mark.gpu
def test_kernels_of_both_ways_have_operators_and_streams(bundle):
    trace = profile_bundle(bundle, 19, "cuda:0", "tf32")
    assert trace.sections == (ISSUED, CAPTURED)
    assert trace.facts["bucket"] == 24
    operators = {s.name for s in trace.spans if s.row == "operators"}
    for section in trace.sections:
        kernels = [s for s in trace.spans if s.section == section and "kernel" in s.details]
        assert {s.name for s in kernels} == operators
        names = [s.name for s in trace.spans if s.section == section and s.row == "host"]
        assert names[0] == "prepare"
        work = "issue operators" if section == ISSUED else "launch"
        assert names[1:] in ([work, "wait", "hand over"], [work, "hand over"])  # a fast GPU is done before the host is


def test_a_precision_that_the_device_lacks_is_refused(bundle):
    with pytest.raises(InputError, match="precision: got 'bf17'"):
        profile_bundle(bundle, 5, "cpu", "bf17")


def test_made_up_ids_lie_in_their_tables_and_reach_far(bundle):
    schema = bundle.manifest.feature_schema
    block = sample_block(schema, 500, seed=3)
    block.check(schema.block_layout)
    assert (block.rows, block.contexts) == (500, 1)
    for f in schema.features:
        values = block.column(schema.columns[f.name])
        if f.is_id:
            rows = schema.table(f.table).rows
            assert values.min() >= 0
            assert values.max() < rows
            if f.scope == "candidate":
                assert len(np.unique(values)) == rows
    assert block.buffer.tobytes() == sample_block(schema, 500, seed=3).buffer.tobytes()
    assert block.buffer.tobytes() != sample_block(schema, 500, seed=4).buffer.tobytes()


@pytest.mark.parametrize("device", BACKENDS)
def test_costs_are_measured_for_every_number_of_rows(bundle, device):
    engine = Engine(bundle, device, "fp32", EngineOptions(max_batch_rows=32))
    engine.warmup()
    costs = measured_costs(engine, rounds=3)
    assert costs.shape == (33,)
    assert (costs > 0).all()
    assert np.allclose(np.diff(costs[24:33], 2), 0)  # a straight line between two buckets
    assert engine.batch_sizes.sum() == 3 * len(engine.buckets or (1, 8, 16, 24, 32))
    engine.close()
