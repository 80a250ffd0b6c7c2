"""The attention of a target over a history is found among generic operators where it is that, and the scores stay."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_model
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import GOLDEN_TOLERANCE, EngineOptions
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.fusion.target_attention import takes
from dpiframe_core.operators.exact_values import exact_values
from kernels.attention.attention_columns import AttentionColumns
from kernels.attention.attention_mma import MmaAttention
from tests.dpiframe_core.compiler.modules import categorical, example
from tests.dpiframe_core.programs_on_host import put_programs_under, scores_by_program

STEPS, ROWS = 6, 20
SPELLED = {"sigmoid": torch.sigmoid, "relu": torch.relu, "tanh": torch.tanh}


class Attention(nn.Module):
    """Zhou et al. 2018, eq. 3, as RecBole and FuxiCTR have it; and some that are another thing."""

    def __init__(
        self, dim, *, units=(7, 5), activation="sigmoid", scaled=True, masked=True, softmax=False, turned=False, uneven=False,
        twice=False, bias=True, reads_scores=False,
    ):  # fmt: skip
        super().__init__()
        widths = [4 * dim, *units]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in zip(widths, units, strict=False))
        self.out = nn.Linear(units[-1], 1)
        self.activation, self.scaled, self.masked, self.softmax, self.turned = activation, scaled, masked, softmax, turned
        self.uneven, self.twice, self.reads_scores = uneven, twice, reads_scores

    def forward(self, q, keys, there):
        q = q.unsqueeze(1).expand(-1, keys.shape[1], -1)
        h = torch.cat([q, keys, keys - q if self.turned else q - keys, q * keys], 2)
        for i, layer in enumerate(self.layers):
            h = torch.tanh(layer(h)) if self.uneven and i else SPELLED[self.activation](layer(h))
        scores = self.out(h).squeeze(2)
        scores = scores / keys.shape[2] ** 0.5 if self.scaled else scores
        scores = scores * there if self.masked else scores
        scores = scores * there * there if self.twice else scores
        scores = scores.softmax(1) if self.softmax else scores
        pooled = (scores.unsqueeze(2) * keys).sum(1)
        return pooled + scores.sum(1, keepdim=True) if self.reads_scores else pooled

    def formula(self, q, keys, there):
        """The same in float64, a step at a time."""
        total = torch.zeros_like(q)
        for step in range(keys.shape[1]):
            k = keys[:, step]
            h = torch.cat([q, k, q - k, q * k], 1)
            for layer in self.layers:
                h = SPELLED[self.activation](h @ layer.weight.double().T + layer.bias.double())
            score = h @ self.out.weight.double().T + self.out.bias.double()
            score = score / keys.shape[2] ** 0.5 if self.scaled else score
            total += (score * there[:, step : step + 1] if self.masked else score) * k
        return total


class Model(nn.Module):
    """`fields` items of a history, side by side."""

    def __init__(self, dim, fields, *, added=False, **options):
        super().__init__()
        self.added = added
        self.names = [f"i{f}" for f in range(fields)]
        self.embed = nn.ModuleList(nn.Embedding(ROWS, dim, padding_idx=0) for _ in self.names)
        self.attention = Attention(dim * fields, **options)
        self.out = nn.Linear(2 * dim * fields, dim * fields if added else 1)

    def read(self, x):
        q, keys = (torch.cat([e(x[n + end]) for n, e in zip(self.names, self.embed, strict=True)], -1) for end in ("", "_list"))
        return q, keys, (x["i0_list"] != 0).to(q.dtype)

    def forward(self, x):
        q, keys, there = self.read(x)
        interest = self.attention(q, keys, there)
        if self.added:
            return torch.sigmoid(self.out(torch.cat([q, q], 1)) + interest)
        return torch.sigmoid(self.out(torch.cat([interest, q], 1))).squeeze(1)

    def oracle(self, x):
        """float64 scores."""
        with torch.no_grad():
            q, keys, there = (t.double() for t in self.read(x))
            interest = self.attention.formula(q, keys, there)
            h = torch.cat([q if self.added else interest, q], 1)
            logit = h @ self.out.weight.double().T + self.out.bias.double()
            return torch.sigmoid(logit + interest if self.added else logit).numpy()


def made(dim=4, fields=2, **options):
    """The compiled module, itself, and its example: histories of every length."""
    torch.manual_seed(1)
    names = [f"i{f}" for f in range(fields)]
    schema = FeatureSchema(
        features=(
            *(
                Categorical(
                    name=f"{n}_list",
                    values="int",
                    encoder=Identity(),
                    table=n,
                    max_values=STEPS,
                    pooling="none",
                    padding_value=0,
                    missing_id=-1,
                )
                for n in names
            ),
            *(categorical(n, n) for n in names),
        ),
        tables=tuple(Table(name=n, rows=ROWS, dim=dim) for n in names),
    )
    values = example(schema)
    length = torch.arange(23) % (STEPS + 1)
    for n in names:
        values[f"{n}_list"] = torch.where(torch.arange(STEPS) < length[:, None], values[f"{n}_list"].clamp(1), 0)
        values[n] = values[n].clamp(1)
    model = Model(dim, fields, **options).eval()
    return compile_model(model, schema, values), model, values


def operators(compiled):
    return [n.op for n in fuse(compiled.graph).nodes]


SETTINGS = [
    {}, {"fields": 1}, {"dim": 10}, {"dim": 16, "units": (6,)}, {"dim": 40, "fields": 1}, {"activation": "relu"},
    {"activation": "tanh", "scaled": False}, {"masked": False}, {"units": (8, 7, 5), "scaled": False, "masked": False},
]  # fmt: skip


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_an_attention_becomes_one_operator_and_scores_by_the_formula(options):
    compiled, model, values = made(**options)
    assert operators(compiled)[:2] == ["lookup", "attention"]
    np.testing.assert_allclose(compiled.golden.scores, model.oracle(values), rtol=0, atol=1e-5)
    assert compiled.deviation < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 1e-3)])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_gpu_scores_by_the_formula(options, precision, tolerance, tmp_path):
    compiled, model, values = made(**options)
    compiled.write(tmp_path / "b", name="din")
    options = EngineOptions(buckets=(64,), max_batch_rows=64, lanes=1, recall=False)
    engine = Engine(read_bundle(tmp_path / "b"), "cuda:0", precision, options)
    timed = engine.warmup().calibrations[0].microseconds
    got = engine.score(
        {name: [v if isinstance(v, int) else [i for i in v if i] for v in t.tolist()] for name, t in values.items()}
    )
    engine.close()
    assert ("loose regions" in timed) == (precision == "fp32")
    np.testing.assert_allclose(got, model.oracle(values), rtol=0, atol=tolerance)


@pytest.mark.bulk
@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"dim": 10}, "fp32"), ({"masked": False}, "tf32"), ({"dim": 16, "units": (6,), "activation": "relu"}, "bf16"),
        ({"dim": 2, "fields": 1, "added": True}, "tf32"),
    ],
)  # fmt: skip
def test_its_kernels_score_by_the_formula_on_the_host(options, precision, monkeypatch, run_folder):
    put_programs_under(monkeypatch, run_folder)
    compiled, model, values = made(**options)
    parts = compiled.schema, compiled.tables, compiled.dense, precision, compiled.golden.block
    for scores in scores_by_program(fuse(compiled.graph), *parts, 32).values():
        np.testing.assert_allclose(scores, model.oracle(values), rtol=0, atol=GOLDEN_TOLERANCE[precision])


def test_what_is_taken_runs_on_tensor_cores_and_little_else_does(monkeypatch, run_folder):
    put_programs_under(monkeypatch, run_folder)
    rng, seen = np.random.default_rng(0), Counter()
    for _ in range(120):
        dims = rng.choice([1, 8, 10, 16, 32, 64, 128, 200], rng.integers(1, 4)).tolist()
        units = rng.choice([1, 16, 40, 64, 80, 128, 200, 256, 400], rng.integers(1, 5)).tolist()
        length, firsts = int(rng.choice([2, 50, 200, 1000])), np.cumsum([0, *dims[:-1]]).tolist()
        keys = [sum(dims) + length * at for at in firsts]
        columns = AttentionColumns(length, tuple(dims), tuple(firsts), tuple(keys), tuple(firsts), -1, ())
        widths = [4 * sum(dims), *units, 1]
        *layers, out = ((torch.zeros(b, a), torch.zeros(b), ()) for a, b in pairwise(widths))
        how = columns, layers, out[:2], "sigmoid", 0.0, "identity", False
        has = all(MmaAttention(*how, dtype, torch.device("cpu")).tiles for dtype in (torch.float32, torch.bfloat16))
        seen[takes(length, dims, units), has] += 1
    assert seen[True, False] == 0
    assert seen[True, True] > 10 * seen[False, True]


def test_an_interest_as_wide_as_the_tasks_is_no_logit_of_the_head():
    """That is float32 without padding, which the attention's kernel does not write."""
    graph = fuse(made(dim=2, fields=1, added=True)[0].graph)
    assert "attention" in [n.op for n in graph.nodes]
    heads = [n for n in graph.nodes if n.op == "head"]
    assert {i for head in heads for i in head.inputs[len(head.attrs.columns) :]} <= exact_values(graph)


@pytest.mark.parametrize(
    "options",
    [
        {"softmax": True}, {"turned": True}, {"uneven": True}, {"twice": True}, {"bias": False}, {"reads_scores": True},
        {"dim": 700}, {"units": (400, 700)}, {"dim": 16, "units": (256, 256, 256)},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_another_thing_stays_generic(options):
    assert "attention" not in operators(made(**options)[0])
