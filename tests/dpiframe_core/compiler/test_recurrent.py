"""nn.GRU and nn.LSTM through `compile`: torch's own scores, one operator a layer, and refusals that say what is so."""

import re
from functools import cache

import pytest
import torch
from torch import nn
from torch._decomp import decompositions

from dpiframe_core import compile as compile_model
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema, Table
from dpiframe_core.fusion.passes import fuse
from tests.dpiframe_core.compiler.modules import called, categorical, example, randomised
from tests.dpiframe_core.compiler.served import served, served_scores

pytestmark = pytest.mark.bulk

ITEMS = 40


def history(steps, dim):
    """A schema of `steps` items, a feature each, of one table, behind a user of another."""
    features = [categorical("user", "user"), *(categorical(f"item{t}", "item") for t in range(steps))]
    return FeatureSchema(
        features=tuple(features), tables=(Table(name="user", rows=9, dim=3), Table(name="item", rows=ITEMS, dim=dim))
    )


class Sequential(nn.Module):
    """The user and what a recurrence makes of the items, `times` over: all hidden states, the last, or also the cell's."""

    def __init__(self, cell, steps, dim, hidden, reads="all", times=1, **options):
        super().__init__()
        self.user, self.item = nn.Embedding(9, 3), nn.Embedding(ITEMS, dim)
        self.cell = cell(dim, hidden, **options)
        self.steps, self.times, self.reads, directions = steps, times, reads, 2 if self.cell.bidirectional else 1
        states = {"all": times * steps, "last": self.cell.num_layers, "cell": 2 * self.cell.num_layers}[reads]
        self.out = nn.Linear(3 + states * directions * hidden, 1)

    def items(self, x):
        return torch.stack([self.item(x[f"item{t}"]) for t in range(self.steps)], 1).repeat(1, self.times, 1)

    def recur(self, items):
        return self.cell(items)

    def states(self, x):
        items = self.items(x)
        out, last = self.recur(items if self.cell.batch_first else items.transpose(0, 1))
        if self.reads == "all":
            return (out if self.cell.batch_first else out.transpose(0, 1)).flatten(1)
        parts = list(last) if isinstance(last, tuple) else [last]
        return torch.cat([part.transpose(0, 1).flatten(1) for part in (parts if self.reads == "cell" else parts[:1])], 1)

    def forward(self, x):
        return torch.sigmoid(self.out(torch.cat([self.user(x["user"]), self.states(x)], 1)))


CASES = {
    "gru": (nn.GRU, 5, 4, 6, {"batch_first": True}),
    "one-step": (nn.GRU, 1, 1, 1, {"batch_first": True}),
    "steps-first": (nn.GRU, 4, 3, 9, {}),
    "no-biases": (nn.GRU, 3, 4, 8, {"batch_first": True, "bias": False}),
    "both-ways": (nn.GRU, 6, 8, 16, {"batch_first": True, "bidirectional": True}),
    "layers": (nn.GRU, 4, 7, 10, {"batch_first": True, "num_layers": 3, "dropout": 0.3}),
    "layers-both-ways": (nn.GRU, 3, 5, 20, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
    "wide": (nn.GRU, 2, 16, 256, {"batch_first": True}),
    "long": (nn.GRU, 5, 4, 8, {"batch_first": True, "times": 8}),
    "longest": (nn.GRU, 5, 4, 8, {"batch_first": True, "times": 40}),
    "lstm": (nn.LSTM, 5, 4, 6, {"batch_first": True}),
    "lstm-steps-first": (nn.LSTM, 4, 3, 1, {"bias": False}),
    "lstm-layers-both-ways": (nn.LSTM, 3, 5, 17, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
}
READ = [(name, reads) for name in CASES for reads in ("all", "last") if not name.startswith("long")]
READ += [("long", "last"), pytest.param("longest", "last", marks=[pytest.mark.slow, pytest.mark.whole])]  # to export
READ += [(name, "cell") for name, (cell, *_) in CASES.items() if cell is nn.LSTM]
GPU_ONLY = [pytest.param("cuda:0", policy, marks=pytest.mark.gpu) for policy in ("waves", "sequential")]


@cache
def compiled_of(name, reads="all"):
    """The module, its schema and what it was compiled to; none is to be changed."""
    cell, steps, dim, hidden, options = CASES[name]
    module, made = randomised(Sequential(cell, steps, dim, hidden, reads, **options)), history(steps, dim)
    return module, made, compile_model(module, made, example(made))


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
@pytest.mark.parametrize(("name", "reads"), READ)
def test_a_bundle_scores_as_the_module_did(name, reads, device, policy, tmp_path):
    module, made, compiled = compiled_of(name, reads)
    assert compiled.deviation <= 1e-5
    compiled.write(tmp_path / "b", name="recurrent")
    with served(tmp_path / "b", device, policy=policy) as scores:
        for rows in (1, 19, 64):
            values = example(made, rows, seed=rows)
            want = called(module, values, {})
            torch.testing.assert_close(scores(values), want, rtol=0, atol=1e-5)
    assert want.std() > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("name", CASES)
def test_lower_precisions_stay_within_their_documented_deviation(name, precision, tolerance, tmp_path):
    module, made, compiled = compiled_of(name, "last")
    compiled.write(tmp_path / "b", name="recurrent")
    values = example(made, 64, seed=5)
    got = served_scores(tmp_path / "b", values, "cuda:0", precision)
    torch.testing.assert_close(got, called(module, values, {}), rtol=0, atol=tolerance)


def test_an_lstm_is_traced_where_torch_exports_its_states_with_an_axis_too_many(monkeypatch):
    """As torch before 2.13 does without oneDNN."""
    whole = decompositions.one_layer_lstm

    def of_old(*arguments, **named):
        out, states = whole(*arguments, **named)
        return out, tuple(state.unsqueeze(0) for state in states)

    monkeypatch.setattr(decompositions, "one_layer_lstm", of_old)
    monkeypatch.setattr(decompositions, "select_one_layer_lstm_function", lambda *_: decompositions.one_layer_lstm)
    for name in ("lstm", "lstm-layers-both-ways"):
        assert compiled_of.__wrapped__(name, "cell")[-1].deviation <= 1e-5
    assert decompositions.one_layer_lstm is of_old


@pytest.mark.parametrize(
    ("name", "reads", "operators"),
    [
        ("gru", "last", ["lookup", "gru", "head"]),
        ("both-ways", "all", ["lookup", "gru", "head"]),
        ("lstm", "all", ["lookup", "lstm", "head"]),
        ("layers", "all", ["lookup", "gru", "gru", "gru", "head"]),
    ],
)
def test_a_layer_is_one_operator_and_reads_its_sequence_where_the_lookup_writes_it(name, reads, operators):
    graph = fuse(compiled_of(name, reads)[-1].graph)
    assert [n.op for n in graph.nodes if n.op != "aten"] == operators
    (first, *_) = (n for n in graph.nodes if n.op in ("gru", "lstm"))
    assert first.inputs[0] in graph.nodes[0].outputs


class LastLayer(Sequential):
    """The last layer's last state, and the first layer's."""

    def states(self, x):
        _, (last, _) = self.cell(self.items(x))
        return torch.cat([last[-1], last[0]], 1)


def test_a_layers_last_state_is_no_copy_of_all():
    module, made = randomised(LastLayer(nn.LSTM, 3, 4, 6, "last", batch_first=True, num_layers=2)), history(3, 4)
    graph = fuse(compile_model(module, made, example(made)).graph)
    first, second, *copies = (n for n in graph.nodes if n.op in ("lstm", "aten"))
    assert [n.attrs.aten.op for n in copies] == ["aten.cat"] * 2  # the module's own: of the states, and of the user and these
    assert copies[0].inputs == (second.outputs[0], first.outputs[0])


class WithState(Sequential):
    def __init__(self, cell, state):
        super().__init__(cell, 3, 4, 6, "last", batch_first=True)
        self.state = state

    def recur(self, items):
        return self.cell(items, self.state(items))


def zeros(items):
    return torch.zeros(1, items.shape[0], 6)


def test_a_first_state_of_zeros_is_none():
    made = history(3, 4)
    for cell, state in ((nn.GRU, zeros), (nn.LSTM, lambda items: (zeros(items), zeros(items)))):
        compiled = compile_model(randomised(WithState(cell, state)), made, example(made))
        assert compiled.deviation <= 1e-5


# fmt: off
class OverRows(Sequential):
    def states(self, x): return self.cell(self.items(x).transpose(0, 1))[0].transpose(0, 1).flatten(1)

class Joined(Sequential):
    def states(self, x): return self.cell(self.items(x).view(-1, 1, 4))[0].reshape(-1, 18)

class Training(Sequential):
    def recur(self, items): return self.cell.train()(items)

class Packed(Sequential):
    def recur(self, items):
        lengths = (items[:, :, 0] > -9).sum(1).cpu()
        return self.cell(nn.utils.rnn.pack_padded_sequence(items, lengths, True, False))

class Plain(Sequential):
    def recur(self, items): return self.rnn(items)
# fmt: on


def plain():
    module = Plain(nn.GRU, 3, 4, 6, batch_first=True)
    module.rnn = nn.RNN(4, 6, batch_first=True)
    return module


ROW = "expected each row to be computed from itself"
REFUSED = {
    "projection": (
        lambda: Sequential(nn.LSTM, 3, 4, 6, "last", batch_first=True, proj_size=6 - 1),
        "got a projection of the hidden state (proj_size), expected an LSTM without: a step here has one product",
    ),
    "too wide": (
        lambda: Sequential(nn.GRU, 3, 4, 257, batch_first=True),
        "got gru of 4 columns into 257, expected at most 1024 into 256, what one launch keeps on a processor",
    ),
    "a state": (
        lambda: WithState(nn.GRU, lambda items: torch.ones(1, items.shape[0], 6)),
        "got a first state that is not zero, expected none or zeros",
    ),
    "a state of the row": (
        lambda: WithState(nn.GRU, lambda items: items[:, :1].transpose(0, 1).repeat(1, 1, 2)[:, :, :6].contiguous()),
        "got a first state that is not zero, expected none or zeros",
    ),
    "rows joined": (
        lambda: Joined(nn.GRU, 3, 4, 6, batch_first=True),
        f"got a recurrence over or beside the rows of the batch, {ROW}",
    ),
    "dropout": (
        lambda: Training(nn.GRU, 3, 4, 6, batch_first=True, num_layers=2, dropout=0.5),
        "got aten.gru.input with dropout between its layers in training mode, expected nothing random",
    ),
    "another recurrence": (plain, "got aten.rnn_tanh.input, expected nn.GRU or nn.LSTM"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_what_cannot_be_taken_over_is_refused_by_its_line_and_reason(kind):
    make, text = REFUSED[kind]
    module, made = randomised(make()), history(3, 4)
    if kind == "projection":
        module.out = nn.Linear(3 + 5, 1)
    with pytest.raises(InputError) as error:
        compile_model(module, made, example(made))
    where, _, rest = str(error.value).partition(": got ")
    assert f"got {rest}" == text
    assert re.fullmatch(r"module: (gru|lstm|rnn_tanh)(_\d+)? \(test_recurrent\.py:\d+, `.*`\)", where)


def test_a_packed_sequence_is_refused_by_its_line():
    module, made = randomised(Packed(nn.GRU, 3, 4, 6, "last", batch_first=True)), history(3, 4)
    with pytest.raises(InputError) as error:
        compile_model(module, made, example(made))
    assert re.fullmatch(
        r"module: test_recurrent\.py:\d+, `return .*pack_padded_sequence\(.*`: got a packed sequence, whose sizes are values "
        r"of the batch, expected the recurrence over the padded sequence",
        str(error.value),
    )


def test_a_recurrence_over_the_rows_is_refused():
    module, made = randomised(OverRows(nn.GRU, 3, 4, 6, batch_first=True)), history(3, 4)
    with pytest.raises(InputError, match=r"module: test_recurrent.py:.*: got a fixed number of rows, .* no recurrence"):
        compile_model(module, made, example(made))


def test_features_that_lie_side_by_side_are_one_window_beside_a_state():
    module = Sequential(nn.LSTM, 3, 4, 6, batch_first=True)
    module.states = lambda x: torch.cat(
        [*(module.item(x[f"item{t}"]) for t in range(3)), module.recur(module.items(x))[0][:, -1]], 1
    )
    module.out = nn.Linear(3 + 3 * 4 + 6, 1)
    schema = history(3, 4)
    compiled = compile_model(module, schema, example(schema))
    calls = [node.attrs.aten for node in compiled.graph.nodes if node.attrs.aten]
    beside = next(call for call in calls if call.op == "aten.cat")
    assert [window.sizes for window in beside.operands] == [(3 * 4,), (6,)]
