"""What `compile` gives beside the graph: an example request, the tasks' names, and a summary for people."""

import re
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_model
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine import Engine
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric, Table, Vocabulary
from dpiframe_core.features.vocabulary import VocabularyTable
from tests.dpiframe_core.compiler.modules import example, randomised, schema


class Fields(nn.Module):
    """A cross layer, attention weights over the fields, and an MLP."""

    def __init__(self, outputs=1):
        super().__init__()
        self.tables = nn.ModuleDict({n: nn.Embedding(r, 8) for n, r in (("user", 50), ("item", 31), ("tag", 7), ("hour", 24))})
        self.cross, self.hidden, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(16, outputs)
        self.train()

    def forward(self, x):
        fields = torch.stack([table(x[name]) for name, table in self.tables.items()], 1)
        weights = fields.sum(-1).softmax(1)
        flat = (fields * weights[:, :, None]).flatten(1)
        crossed = flat * self.cross(flat) + flat
        return torch.sigmoid(self.out(torch.relu(self.hidden(crossed))))


class Named(Fields):
    """Its scores one by one under names."""

    def forward(self, x):
        found = super().forward(x)
        return {f"{name}_pred": found[:, i] for i, name in enumerate(("click", "buy"))} | {"all": found}


class Said(NamedTuple):
    prob: torch.Tensor
    logit: torch.Tensor


class Tuples(Fields):
    def forward(self, x):
        return Said(super().forward(x), torch.zeros(1))


class Switched(Fields):
    """What it does is said by numbers among its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("on", torch.tensor(True))
        self.register_buffer("times", torch.tensor(3))
        self.register_buffer("power", torch.tensor([0.5]))

    def forward(self, x):
        found = super().forward(x)
        if self.on:
            for _ in range(int(self.times)):
                found = found ** float(self.power)
        return found if bool(self.times > 2) else 1 - found


class Counting(Switched):
    def forward(self, x):
        self.times += 1
        return super().forward(x)


def test_a_named_tuple_gives_its_values_by_name():
    made = schema()
    module = randomised(Tuples())
    by_name, by_place = (compile_model(module, made, example(made), output=output) for output in ("prob", 0))
    assert by_name.golden.scores.tobytes() == by_place.golden.scores.tobytes()


def test_a_module_may_branch_on_numbers_that_it_keeps():
    made = schema()
    module = randomised(Switched())
    with torch.no_grad():
        module.on.fill_(True), module.times.fill_(3), module.power.fill_(0.5)
    before = {name: value.clone() for name, value in module.named_buffers()}
    for on in (True, False):
        module.on.fill_(on)
        compiled = compile_model(module, made, example(made))
        assert compiled.deviation <= 1e-6
        assert compiled.golden.scores.min() > (0.6 if on else 0)
    assert {name: value.tolist() for name, value in module.named_buffers()} == {
        name: value.tolist() for name, value in (before | {"on": torch.tensor(False)}).items()
    }
    with pytest.raises(InputError, match=r"module: got .*, expected (nothing that the module changes|one that stays)"):
        compile_model(Counting(), made, example(made))


@pytest.fixture
def compiled():
    made = schema()
    return compile_model(randomised(Fields()), made, example(made))


def test_an_example_request_is_stored_that_the_engine_scores_as_the_module_does(compiled, tmp_path):
    compiled.write(tmp_path / "b", name="fields")
    request = read_bundle(tmp_path / "b").example
    engine = Engine.load(tmp_path / "b", "cpu")
    engine.warmup()
    scores = engine.score(request["candidates"], request["context"])
    torch.testing.assert_close(torch.from_numpy(scores), torch.from_numpy(compiled.golden.scores[:5]), rtol=0, atol=1e-6)
    engine.close()
    own = request | {"candidates": {name: values[:1] for name, values in request["candidates"].items()}}
    compiled.write(tmp_path / "own", name="fields", example=own)
    assert read_bundle(tmp_path / "own").example == own


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"a": 1}, r"example: got \['a'\], expected candidates, and where there is one a context"),
        ([1], r"example: got 'list', expected candidates, and where there is one a context"),
        ({"candidates": {"nope": [1]}, "context": {}}, r"example.candidates"),
    ],
)
def test_an_example_that_is_no_request_is_refused(compiled, tmp_path, example, message):
    with pytest.raises(InputError, match=message):
        compiled.write(tmp_path / "b", name="fields", example=example)
    assert not (tmp_path / "b").exists()


def test_an_example_speaks_the_raw_values_of_the_vocabularies(tmp_path):
    features = (Categorical(name="word", encoder=Vocabulary(), table="word"), Numeric(name="age", scope="context"))
    made = FeatureSchema(features=features, tables=(Table(name="word", rows=3, dim=4),))

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.out = nn.Embedding(3, 4), nn.Linear(5, 1)

        def forward(self, x):
            return torch.sigmoid(self.out(torch.cat([self.word(x["word"]), x["age"].unsqueeze(1)], 1)))

    values = {"word": torch.tensor([2, 0, 1]), "age": torch.tensor([0.5, 1.0, 2.0])}
    compiled, words = compile_model(randomised(Words()), made, values), {"a": 0, "b": 1, "c": 2}
    for name, known in (("b", VocabularyTable.of(words)), ("mapping", words)):
        compiled.write(tmp_path / name, name="words", vocabularies={"word": known})
        assert read_bundle(tmp_path / name).example == {"context": {"age": 0.5}, "candidates": {"word": ["c", "a", "b"]}}
    with pytest.raises(InputError, match=r"^vocabularies\.word: vocabulary: got a list, expected a mapping of values to ids$"):
        compiled.write(tmp_path / "c", name="words", vocabularies={"word": list(words)})


@pytest.mark.parametrize(
    ("module", "options", "tasks"),
    [
        (Fields(1), {}, ("click",)),
        (Fields(3), {}, ("task0", "task1", "task2")),
        (Named(2), {"output": ["buy_pred", "click_pred"]}, ("buy_pred", "click_pred")),
        (Named(2), {"output": "all"}, ("task0", "task1")),
        (Named(2), {"output": ["click_pred"]}, ("click",)),
        (Named(2), {"output": ["all", "buy_pred"]}, ("task0", "task1", "task2")),
    ],
)
def test_tasks_are_as_many_as_the_module_gives_scores_and_named_as_it_names_them(module, options, tasks, tmp_path):
    made = schema()
    compiled = compile_model(randomised(module), made, example(made), **options)
    assert compiled.tasks == tasks
    assert compiled.write(tmp_path / "b", name="tasks").tasks == tasks


def test_a_summary_says_what_became_of_the_module_and_how_fast_it_is(compiled):
    text = compiled.summary()
    head, *lines = text.splitlines()
    assert re.fullmatch(
        r"Fields: \d+ operators, \d+ after fusion; 1 task \(click\); scores within \S+ of the module's own", head
    )
    before, after = map(int, re.findall(r"(\d+) (?:operators|after)", head))
    said = {line.split()[0]: line for line in lines}
    assert before > after
    assert "lookup of 4 features" in said["fused"]
    assert "cross_v2" in said["fused"]
    assert "linear + relu" in said["fused"]
    assert "softmax" in said["generic"]
    for rows in ("1 row ", "256 rows"):
        (line,) = (line for line in lines if line.strip().startswith(rows))
        ours, own, ratio = map(float, re.findall(r"([\d.]+)(?: ms|x)", line))
        assert ours > 0
        assert ratio == pytest.approx(own / ours, rel=0.1)


def test_a_summary_leaves_the_module_as_it_was(compiled):
    module = compiled.module.module.train()
    compiled.summary()
    assert all(m.training for m in module.modules())


class Norms(nn.Module):
    """A layer norm for each field, as MaskNet has; `eps` of the first, `read` if it is read for itself, too."""

    def __init__(self, eps=1e-5, read=False):
        super().__init__()
        self.tables = nn.ModuleDict({n: nn.Embedding(r, 8) for n, r in (("user", 50), ("item", 31), ("tag", 7), ("hour", 24))})
        self.norms = nn.ModuleList(nn.LayerNorm(8, eps=eps if i == 0 else 1e-5) for i in range(4))
        self.out, self.read = nn.Linear(32, 1), read

    def forward(self, x):
        fields = torch.stack([table(x[name]) for name, table in self.tables.items()], 1)
        normed = [norm(fields[:, i]) for i, norm in enumerate(self.norms)]
        more = torch.tanh(normed[0]).sum(1, keepdim=True) if self.read else 0
        return torch.sigmoid(self.out(torch.cat(normed, 1)) + more)


@pytest.mark.parametrize(("settings", "norms"), [({}, 1), ({"eps": 1e-2}, 4), ({"read": True}, 4)], ids=["all", "eps", "read"])
def test_norms_of_neighbouring_fields_are_one_where_they_are_alike(settings, norms):
    made = schema()
    found = compile_model(randomised(Norms(**settings)), made, example(made))
    assert found.deviation < 1e-6
    assert sum(n.attrs.aten is not None and n.attrs.aten.op == "aten.layer_norm" for n in found.graph.nodes) == norms


class Steps(nn.Module):
    """A recurrent cell called step by step, with a bias or without, as RecBole's FiGNN has it."""

    def __init__(self, cell, bias):
        super().__init__()
        self.user, self.item, self.tag, self.hour = (nn.Embedding(r, 8) for r in (50, 31, 7, 24))
        self.cell, self.out = cell(8, 8, bias=bias), nn.Linear(8, 1)

    def forward(self, x):
        state = self.user(x["user"])
        if isinstance(self.cell, nn.LSTMCell):
            state = state, state.tanh()
        for name in ("item", "tag", "hour"):
            state = self.cell(getattr(self, name)(x[name]), state)
        return torch.sigmoid(self.out(state[0] * state[1] if isinstance(state, tuple) else state))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu")], ids=["gru", "lstm", "tanh", "relu"]
)
def test_a_recurrent_cell_is_its_layers_step_by_step(cell, bias):
    made = schema()
    found = compile_model(randomised(Steps(cell, bias)), made, example(made))
    assert found.deviation < 1e-6
    assert found.golden.scores.std() > 1e-3
