"""Plain modules through `compile`, a bundle on disk and an engine: the scores that come out are the module's own."""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_model
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.describe.inspect import describe
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.program import CudaProgram
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph.schedule import POLICIES
from dpiframe_core.operators.cpu import CpuOperators
from dpiframe_core.operators.cuda import CudaOperators
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.modules import MODULES, DeepFM, Mlp, called, example, randomised, schema
from tests.dpiframe_core.compiler.served import served, served_scores

pytestmark = pytest.mark.bulk

GPU_ONLY = [
    pytest.param("cuda:0", policy, marks=pytest.mark.gpu) for policy in ("waves", "regions", "breadth_first", "sequential")
]


@cache
def compiled_of(name, dim=8):
    """The module and what it was compiled to; neither is to be changed."""
    make, schema_of, options = MODULES[name]
    module, made = randomised(make(dim)), schema_of(dim)
    return module, made, options, compile_model(module, made, example(made), **options)


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
@pytest.mark.parametrize("name", MODULES)
def test_a_bundle_scores_as_the_module_did(name, device, policy, tmp_path):
    module, made, options, compiled = compiled_of(name)
    tasks = compiled.golden.scores.shape[1]
    compiled.write(tmp_path / "b", name=name, tasks=tuple(f"task{i}" for i in range(tasks)))
    with served(tmp_path / "b", device, policy=policy) as scores:
        for rows in (1, 19, 64):
            values = example(made, rows, seed=rows)
            want = called(module, values, options)
            torch.testing.assert_close(scores(values), want, rtol=0, atol=1e-5)
    assert want.std() > 1e-3


@pytest.mark.covering(1)
@pytest.mark.parametrize("dim", [4, 10, 16])
@pytest.mark.parametrize("name", ["mlp", "normalised", "deepfm", "stacked", "mixed"])
def test_any_embedding_dim_compiles(name, dim):
    assert compiled_of(name, dim)[-1].deviation <= 1e-5


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("passes", [(), tuple(PASSES)], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", ["transformer", "two-tower", "deepfm"])
def test_scores_depend_neither_on_the_schedule_nor_on_fusion(name, passes, policy, device):
    _, made, _, compiled = compiled_of(name)
    graph, target = fuse(compiled.graph, passes), torch.device(device)
    store, plan = EmbeddingStore(made, compiled.tables, target), POLICIES[policy](graph, 4)
    if device == "cpu":
        lane = CpuLane(CpuOperators(graph, made, store, compiled.dense), plan, made.block_layout, graph)
    else:
        operators = CudaOperators(graph, made, store, compiled.dense, "fp32")
        program = CudaProgram("plan", graph, plan, operators, False)
        lane = CudaLane([program], made.block_layout, (1, 16, 64), "fp32", target, {})
    lane.prepare()
    np.testing.assert_allclose(lane.run([compiled.golden.block]).scores, compiled.golden.scores, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("name", MODULES)
def test_lower_precisions_stay_within_their_documented_deviation(name, precision, tolerance, tmp_path):
    module, made, options, compiled = compiled_of(name)
    tasks = compiled.golden.scores.shape[1]
    compiled.write(tmp_path / "b", name=name, tasks=tuple(f"task{i}" for i in range(tasks)))
    values = example(made, 64, seed=5)
    got = served_scores(tmp_path / "b", values, "cuda:0", precision)
    torch.testing.assert_close(got, called(module, values, options), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("mlp", ["lookup", "linear", "linear", "aten", "head"]),
        ("deepfm", ["lookup", "fm", "linear", "head"]),
        ("cross-net", ["lookup", "cross_v2", "cross_v2", "linear", "head"]),
        ("stacked", ["lookup", "head"]),
        ("mixed", ["lookup", "linear", "head"]),
    ],
)
def test_what_is_known_becomes_the_operators_that_fusion_knows(name, operators):
    graph = fuse(compiled_of(name)[-1].graph)
    assert sorted(n.op for n in graph.nodes) == sorted(operators)


FM = {
    "half of the sum": lambda v: 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1, keepdim=True),
    "sum of the halves": lambda v: ((v.sum(1).pow(2) - (v * v).sum(1)) * 0.5).sum(1, keepdim=True),
    "half by division": lambda v: (v.sum(1, keepdim=True).square() - v.square().sum(1, keepdim=True)).sum(2) / 2,
    "of some fields": lambda v: 0.5 * (v[:, 1:].sum(1) ** 2 - (v[:, 1:] ** 2).sum(1)).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("spelling", FM)
def test_a_factorization_machine_is_known_in_its_usual_spellings(spelling):
    class Spelled(DeepFM):
        def forward(self, x):
            v = self.embeddings(x)
            return torch.sigmoid(self.deep(v.flatten(1)) + FM[spelling](v) + self.first(x).sum(1))

    made = schema(first=True)
    compiled = compile_model(randomised(Spelled()), made, example(made))
    (fm,) = (n for n in compiled.graph.nodes if n.op == "fm")
    assert (fm.attrs.offset, fm.attrs.fields, fm.attrs.dim) == ((8, 3, 8) if "some" in spelling else (0, 4, 8))


@pytest.mark.parametrize(
    "unlike",
    [
        lambda v: 0.5 * (v.sum(1) ** 2 - (v[:, 1:] ** 2).sum(1)).sum(-1, keepdim=True),
        lambda v: 0.4 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1, keepdim=True),
        lambda v: 0.5 * ((v**2).sum(1) - v.sum(1) ** 2).sum(-1, keepdim=True),
        lambda v: 0.5 * (v.sum(2) ** 2 - (v**2).sum(2)).sum(-1, keepdim=True),
    ],
    ids=["other fields", "no half", "turned round", "along the dim"],
)
def test_what_only_looks_like_a_factorization_machine_stays_what_it_is(unlike):
    class Spelled(DeepFM):
        def forward(self, x):
            v = self.embeddings(x)
            return torch.sigmoid(self.deep(v.flatten(1)) + unlike(v) + self.first(x).sum(1))

    made = schema(first=True)
    compiled = compile_model(randomised(Spelled()), made, example(made))
    assert "fm" not in [n.op for n in compiled.graph.nodes]


def test_batch_norm_is_folded_and_dropout_is_gone():
    compiled = compiled_of("mlp")[-1]
    assert {n.op for n in compiled.graph.nodes} == {"lookup", "concat", "linear", "activation", "aten"}
    assert "net.0.norm.weight" in compiled.dense
    assert "net.0.weight" not in compiled.dense


def test_views_are_no_operators():
    """The transposes, reshapes and slices of attention by heads cost nothing: copies only where a product needs a run."""
    graph = compiled_of("transformer")[-1].graph
    clones = [n.name for n in graph.nodes if n.op == "aten" and n.attrs.aten.op == "aten.clone"]
    assert clones == ["linear_1", "linear_5", "linear_8"]  # heads joined again, twice, and the token's last state


def test_the_module_is_left_as_it_was():
    module = randomised(Mlp())
    module.train()
    module.net[3].eval()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    made = schema(numbers=True)
    compile_model(module, made, example(made))
    assert module.training
    assert module.net[1].training
    assert not module.net[3].training
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


def test_logits_and_named_outputs_can_be_asked_for():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(50, 3), nn.Linear(3, 1)

        def forward(self, x):
            return {"loss": x["user"], "logit": self.out(self.table(x["user"]))}

    one = FeatureSchema(features=schema(3).features[:1], tables=schema(3).tables[:1])
    module = randomised(Plain())
    compiled = compile_model(module, one, example(one), output="logit", logits=True)
    with torch.no_grad():
        want = module(example(one))["logit"].sigmoid()
    torch.testing.assert_close(torch.from_numpy(compiled.golden.scores), want, rtol=0, atol=0)


def test_a_value_that_is_added_to_itself_counts_twice():
    class Doubled(Mlp):
        def forward(self, x):
            y = self.embeddings(x).flatten(1)[:, :1] * 3 + 0.5
            return torch.sigmoid(y + y)

    class Head(Mlp):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(32, 1)

        def forward(self, x):
            y = self.out(self.embeddings(x).flatten(1))
            return torch.sigmoid(y + y)

    for kind in (Doubled, Head):
        module, made = randomised(kind()), schema()
        compiled = compile_model(module, made, example(made))
        want = called(module, example(made), {}).numpy()
        np.testing.assert_allclose(compiled.golden.scores, want, rtol=0, atol=1e-6)
        assert compiled.deviation <= 1e-5


def test_tied_weights_are_one_table():
    class Tied(DeepFM):
        def __init__(self):
            super().__init__()
            self.embeddings.tables["tag"] = self.embeddings.tables["hour"]

    made = schema(first=True)
    features = [f.model_copy(update={"table": "hour"}) if f.name == "tag" else f for f in made.features]
    shared = FeatureSchema(features=tuple(features), tables=tuple(t for t in made.tables if t.name != "tag"))
    values = example(shared)
    values["tag"] %= 7  # its first-order weights have fewer rows
    compiled = compile_model(randomised(Tied()), shared, values)
    assert compiled.tables.keys() == {"user", "item", "hour", "user_w", "item_w", "tag_w", "hour_w"}


def test_a_compiled_bundle_can_be_described(tmp_path):
    compiled_of("transformer")[-1].write(tmp_path / "b", name="t")
    page = describe(read_bundle(tmp_path / "b"))
    assert "t version 1: graph with 4 features" in page
    assert "aten.softmax" in page


def test_importing_the_core_stays_light():
    code = "import sys, dpiframe_core; dpiframe_core.compile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
