"""The compressed interaction network is found among generic operators where it is that, and the scores stay."""

import importlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dpiframe_core import compile as compile_model
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import GOLDEN_TOLERANCE, EngineOptions
from dpiframe_core.features.schema import FeatureSchema, Table
from dpiframe_core.fusion.passes import PASSES, fuse
from tests.dpiframe_core.compiler.modules import categorical, example
from tests.dpiframe_core.programs_on_host import put_programs_under, scores_by_program

FIELDS, DIM = 5, 8
NAMES = [f"f{i}" for i in range(FIELDS)]
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda x: x}


class Cin(nn.Module):
    """Lian et al. 2018, in the spellings that libraries use; and some that are another thing."""

    def __init__(
        self, units, *, fields=FIELDS, halves=False, upper=False, by_mul=False, fields_first=False, bias=True, apart=False,
        activation="relu", last_tanh=False, over=-1, shifted=False, own_bias=False, reads_twice=False,
    ):  # fmt: skip
        super().__init__()
        self.units, self.halves, self.upper, self.by_mul, self.fields_first = units, halves, upper, by_mul, fields_first
        self.apart, self.last_tanh, self.over, self.shifted, self.reads_twice = apart, last_tanh, over, shifted, reads_twice
        self.activation, self.layers, before = activation, nn.ModuleList(), fields
        for k, n in enumerate(units):
            self.layers.append(nn.Conv1d(before * fields, n, 1, bias=bias and not (own_bias and k)))
            before = n // 2 if halves else n

    def forward(self, x0):
        x, maps = x0, []
        for k, layer in enumerate(self.layers):
            a, b = (x0, x) if self.fields_first else (x, x0)
            b = b + 1 if self.shifted and k else b
            pairs = a.unsqueeze(2) * b.unsqueeze(1) if self.by_mul else torch.einsum("bhd,bmd->bhmd", a, b)
            out = layer(pairs.flatten(1, 2))
            out = torch.tanh(out) if self.last_tanh and k else ACTIVATIONS[self.activation](out)
            x = own = out
            if self.halves and k < len(self.units) - 1:
                x, own = out.chunk(2, 1)
                x, own = (own, x) if self.upper else (x, own)
            maps.append(own)
        summed = torch.cat([m.sum(2) for m in maps], 1) if self.apart else torch.cat(maps, 1).sum(self.over)
        return summed * x.mean((1, 2))[:, None] if self.reads_twice else summed

    def formula(self, x0):
        """The same in float64 from equation 6, a map at a time."""
        x, pooled = x0, []
        for k, layer in enumerate(self.layers):
            weight = layer.weight.detach().double()[:, :, 0]
            bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.detach()
            out = torch.zeros(len(x0), len(weight), x0.shape[2], dtype=torch.float64)
            for n in range(len(weight)):
                for i in range(x.shape[1]):
                    for j in range(x0.shape[1]):
                        channel = j * x.shape[1] + i if self.fields_first else i * x0.shape[1] + j
                        out[:, n] += weight[n, channel] * x[:, i] * x0[:, j]
                out[:, n] = ACTIVATIONS[self.activation](out[:, n] + bias[n].double())
            half, cut = out.shape[1] // 2, self.halves and k < len(self.units) - 1
            parts = (out[:, half:], out[:, :half]) if self.upper else (out[:, :half], out[:, half:])
            x, own = parts if cut else (out, out)
            pooled.append(own.sum(2))
        return torch.cat(pooled, 1)


class Model(nn.Module):
    def __init__(self, cin, width, dim=DIM):
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(20, dim) for _ in NAMES)
        self.cin, self.deep, self.out = cin, nn.Linear(FIELDS * dim, 3), nn.Linear(width + 3, 1)

    def fields(self, x):
        return torch.stack([e(x[name]) for name, e in zip(NAMES, self.embed, strict=True)], 1)

    def forward(self, x):
        fields = self.fields(x)
        return torch.sigmoid(self.out(torch.cat([self.cin(fields), self.deep(fields.flatten(1))], 1))).squeeze(1)


def schema(dim):
    return FeatureSchema(
        features=tuple(categorical(n, n) for n in NAMES), tables=tuple(Table(name=n, rows=20, dim=dim) for n in NAMES)
    )


def made(cin, dim=DIM):
    """The compiled module, itself, and its example."""
    torch.manual_seed(1)
    with torch.no_grad():
        width = cin(torch.randn(1, FIELDS, dim)).shape[1]
    model = Model(cin, width, dim).eval()
    values = example(schema(dim))
    return compile_model(model, schema(dim), values), model, values


def operators(compiled):
    return [n.op for n in fuse(compiled.graph).nodes]


def oracle(model, values):
    """float64 scores."""
    with torch.no_grad():
        fields = model.fields(values).double()
        deep = functional.linear(fields.flatten(1), model.deep.weight.double(), model.deep.bias.double())
        x = torch.cat([model.cin.formula(fields), deep], 1)
        return torch.sigmoid(functional.linear(x, model.out.weight.double(), model.out.bias.double())).numpy()


def engine_scores(path, values, device, precision):
    options = EngineOptions(buckets=(64,), max_batch_rows=64, lanes=1)
    engine = Engine(read_bundle(path), device, precision, options)
    engine.warmup()
    try:
        return engine.score({name: v.tolist() for name, v in values.items()})
    finally:
        engine.close()


SETTINGS = [
    {"units": (6, 4)}, {"units": (7,)}, {"units": (6, 4, 3), "halves": True}, {"units": (4, 2), "halves": True},
    {"units": (6, 4, 3), "halves": True, "upper": True}, {"units": (6, 4), "fields_first": True},
    {"units": (6, 4, 3), "fields_first": True, "by_mul": True, "halves": True, "upper": True},
    {"units": (6, 4), "by_mul": True}, {"units": (6, 4), "bias": False, "activation": "identity"},
    {"units": (6, 4), "activation": "tanh", "apart": True}, {"units": (5, 4, 3), "fields_first": True, "apart": True},
    {"units": (6, 4, 3), "halves": True, "apart": True, "bias": False},
]  # fmt: skip


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_network_becomes_one_operator_and_scores_by_the_formula(options, tmp_path):
    compiled, model, values = made(Cin(**options))
    assert "cin" in operators(compiled)
    assert "aten" not in operators(compiled)
    compiled.write(tmp_path / "b", name="cin")
    got = engine_scores(tmp_path / "b", values, "cpu", "fp32")
    np.testing.assert_allclose(got, oracle(model, values), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [4, 10, 16, 40])
def test_embeddings_of_other_dims_do_the_same(dim, tmp_path):
    compiled, model, values = made(Cin((6, 4, 3), halves=True), dim)
    assert "aten" not in operators(compiled)
    np.testing.assert_allclose(compiled.golden.scores, oracle(model, values), rtol=0, atol=1e-5)
    assert compiled.deviation < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 1e-3)])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_gpu_scores_by_the_formula(options, precision, tolerance, tmp_path):
    compiled, model, values = made(Cin(**options))
    compiled.write(tmp_path / "b", name="cin")
    got = engine_scores(tmp_path / "b", values, "cuda:0", precision)
    np.testing.assert_allclose(got, oracle(model, values), rtol=0, atol=tolerance)


@pytest.mark.bulk
@pytest.mark.parametrize(
    ("options", "precision"),
    [({"units": (6, 4), "bias": False}, "fp32"), (SETTINGS[6], "tf32"), (SETTINGS[2] | {"activation": "tanh"}, "bf16")],
)
def test_its_kernels_score_by_the_formula_on_the_host(options, precision, monkeypatch, run_folder):
    put_programs_under(monkeypatch, run_folder)
    compiled, model, values = made(Cin(**options))
    parts = compiled.schema, compiled.tables, compiled.dense, precision, compiled.golden.block
    for scores in scores_by_program(fuse(compiled.graph), *parts, 32).values():
        np.testing.assert_allclose(scores, oracle(model, values), rtol=0, atol=GOLDEN_TOLERANCE[precision])


@pytest.mark.parametrize(
    "options",
    [
        {"last_tanh": True}, {"over": 1}, {"shifted": True}, {"own_bias": True}, {"reads_twice": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_another_thing_stays_generic(options):
    units = (8, 8) if "over" in options else (6, 4)
    compiled, _, _ = made(Cin(units, **options), 16 if "over" in options else DIM)
    assert "cin" not in operators(compiled)


def test_more_fields_than_its_kernel_takes_stay_generic():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.cin = Cin((2,), fields=85)

        def forward(self, x):
            return self.cin(torch.cat([x] * 17, 1))

    assert "cin" not in operators(made(Repeated())[0])


def test_without_the_pass_the_operators_stay():
    compiled, _, _ = made(Cin((6, 4)))
    assert "cin" not in [n.op for n in fuse(compiled.graph, [name for name in PASSES if name != "cin"]).nodes]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("where", "name", "options"),
    [
        ("deepctr_torch.layers.interaction", "CIN", {"layer_size": (6, 4, 3)}),
        ("deepctr_torch.layers.interaction", "CIN", {"layer_size": (6, 4), "activation": "linear"}),
        ("torch_rechub.basic.layers", "CIN", {"cin_size": [6, 4, 3]}),
        ("fuxictr.pytorch.layers.interactions.compressed_interaction_net", "CompressedInteractionNet", None),
    ],
)
def test_the_networks_of_libraries_are_found(where, name, options, split):
    pytest.importorskip(where.partition(".")[0])
    own = getattr(importlib.import_module(where), name)
    cin = own(FIELDS, [6, 4]) if options is None else own(FIELDS, **options, split_half=split)
    compiled, _, _ = made(cin)
    assert "cin" in operators(compiled)
    assert "aten" not in operators(compiled)
    assert compiled.deviation < 1e-5
