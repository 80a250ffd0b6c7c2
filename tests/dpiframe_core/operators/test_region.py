"""Regions computed as one function: the values of the operators one by one, on any number of rows."""

from functools import cache

import pytest
import torch

from dpiframe_core import compile as compile_model
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.regions import group_regions
from dpiframe_core.graph.schedule import POLICIES
from dpiframe_core.operators.cpu import CpuOperators
from dpiframe_core.operators.region import Region, RegionFailed
from tests.dpiframe_core.compiler.history_models import MODELS as HISTORY_MODELS
from tests.dpiframe_core.compiler.history_models import example as history_example
from tests.dpiframe_core.compiler.history_models import schema as history_schema
from tests.dpiframe_core.compiler.modules import MODULES, example, randomised
from tests.dpiframe_core.graph.test_regions import generic, graph_of

GENERIC = ["transformer", "two-tower", "normalised"]


@cache
def compiled(name):
    """The schema and what was compiled; neither is to be changed."""
    make, schema_of, options = MODULES[name]
    schema = schema_of(8)
    return schema, compile_model(randomised(make(8)), schema, example(schema), **options)


def values_of(schema, model):
    """Every value of the model's graph on its golden rows, by the operators one by one."""
    graph, kept = fuse(model.graph), {}
    store = EmbeddingStore(schema, model.tables, torch.device("cpu"))
    operators = CpuOperators(graph, schema, store, model.dense)
    for step in POLICIES["sequential"](graph, 1).steps:
        operators.for_block(model.golden.block)[step.node](kept)
    return graph, kept


def padded(t, dtype=torch.float32):
    wide = torch.full((len(t) + 3, t.shape[1] + 5), 7.0, dtype=dtype)
    wide[: len(t), : t.shape[1]] = t
    return wide


def run(region, node, values, rows, dtype=torch.float32):
    outs = [padded(torch.full_like(values[o], torch.nan), dtype) for o in node.outputs]
    with torch.inference_mode():
        region([padded(values[i], dtype) for i in node.inputs], outs, rows)
    for o, t in zip(node.outputs, outs, strict=True):
        assert (t[:, values[o].shape[1] :] == 7.0).all(), "columns beyond the value are no part of it"
    return [t[:rows, : values[o].shape[1]].float() for o, t in zip(node.outputs, outs, strict=True)]


@pytest.mark.parametrize("name", GENERIC)
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 22), (torch.bfloat16, 6)])
def test_a_region_gives_the_values_of_its_operators(name, dtype, digits):
    schema, model = compiled(name)
    graph, values = values_of(schema, model)
    nodes = [n for n in group_regions(graph).nodes if n.op == "region"]
    assert nodes
    for node in nodes:
        region = Region(node, graph, model.dense, dtype, torch.device("cpu"), backend="eager")
        for rows in (1, 2, len(model.golden.block.request_of_row)):
            for got, o in zip(run(region, node, values, rows, dtype), node.outputs, strict=True):
                want = values[o][:rows]
                torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2.0**-digits * 8)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i == 0 else pytest.mark.whole) for i, name in enumerate(HISTORY_MODELS)]
)
def test_a_region_takes_windows_that_overlap_positions_and_rankings(name):
    """As one graph: Dynamo breaks off at what it cannot follow."""
    module, made = randomised(HISTORY_MODELS[name]()), history_schema()
    model = compile_model(module, made, history_example(19))
    graph, values = values_of(made, model)
    nodes = [n for n in group_regions(graph).nodes if n.op == "region"]
    assert nodes
    for node in nodes:
        region = Region(node, graph, model.dense, torch.float32, torch.device("cpu"), backend="eager")
        for rows in (1, 2, 19):
            for got, o in zip(run(region, node, values, rows), node.outputs, strict=True):
                torch.testing.assert_close(got, values[o][:rows], rtol=1e-5, atol=1e-5)


@pytest.mark.bulk
def test_inductor_compiles_a_region_once_for_all_numbers_of_rows(monkeypatch, tmp_path):
    import torch._inductor.config as inductor  # here: it takes two seconds, of each process that collects

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor.cpp, "vec_isa_ok", True)  # else it compiles programs to see whether the CPU has what it says
    graph = graph_of(generic("a", "x"), generic("b", "a", "x"))  # exp(x) + x
    (node,) = [n for n in group_regions(graph).nodes if n.op == "region"]
    region = Region(node, graph, {}, torch.float32, torch.device("cpu"))
    x = torch.randn(30, 4)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (17, 1, 2, 30):
        (got,) = run(region, node, {"x": x, "b": x}, rows)
        torch.testing.assert_close(got, (x.double().exp() + x)[:rows].float(), rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_a_region_that_does_not_compile_says_which():
    schema, model = compiled("transformer")
    graph, values = values_of(schema, model)
    (node,) = [n for n in group_regions(graph).nodes if n.op == "region"]

    def refuses(module, inputs):
        raise NotImplementedError("no compiler")

    region = Region(node, graph, model.dense, torch.float32, torch.device("cpu"), backend=refuses)
    with pytest.raises(RegionFailed, match=r"region\.0: .*no compiler"):
        run(region, node, values, 3)
