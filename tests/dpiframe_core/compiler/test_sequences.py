"""Histories step by step: modules that read them as people write them, taken over with the mask that their ids make."""

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_module
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Table
from tests.dpiframe_core.compiler.modules import called
from tests.dpiframe_core.compiler.served import exact, served_scores

STEPS, DIM, ROWS = 6, 8, 12
GPU_ONLY = [pytest.param("cuda:0", policy, marks=pytest.mark.gpu) for policy in ("waves", "regions", "sequential")]


def schema(**of_history):
    plain = {"values": "int", "encoder": Identity(), "table": "item"}
    history = {"max_values": STEPS, "pooling": "none", "missing_id": -1, "padding_value": 0, **of_history}
    features = (Categorical(name="item", missing_id=0, **plain), Categorical(name="hist", **(plain | history)))
    return FeatureSchema(features=features, tables=(Table(name="item", rows=30, dim=DIM),))


def example():
    draw = torch.Generator().manual_seed(3)
    hist = torch.randint(1, 30, (ROWS, STEPS), generator=draw)
    for row in range(ROWS):
        hist[row, row % (STEPS + 1) :] = 0
    return {"item": torch.randint(1, 30, (ROWS,), generator=draw), "hist": hist}


class Base(nn.Module):
    """Embeddings of the item, and of its history with zeros where it ends; `read` gives [rows, anything] of them."""

    width = DIM

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(30, DIM, padding_idx=0)
        self.made()
        self.out = nn.Linear(self.width + DIM, 1)

    def made(self):
        pass

    def forward(self, x):
        item, history = self.table(x["item"]), self.table(x["hist"])
        return torch.sigmoid(self.out(torch.cat([item, self.read(item, history, x["hist"])], 1)))


class Flat(Base):
    width = STEPS * DIM

    def read(self, item, history, ids):
        return history.flatten(1)


class MaskedMean(Base):
    def read(self, item, history, ids):
        there = (ids != 0).float().unsqueeze(2)
        return (history * there).sum(1) / there.sum(1).clamp(min=1)


class PlainMean(Base):
    def read(self, item, history, ids):
        return history.mean(1)


class Attention(Base):
    def read(self, item, history, ids):
        scores = (history @ item.unsqueeze(2)).squeeze(2).masked_fill(ids == 0, -1e9)
        return (scores.softmax(1).unsqueeze(2) * history).sum(1)


class Largest(Base):
    def read(self, item, history, ids):
        return history.amax(1)


class ByPosition(Base):
    width = 2 * DIM

    def read(self, item, history, ids):
        return torch.cat([history[:, 0], history[:, [2, 4]].sum(1)], 1)


class Transformer(Base):
    def made(self):
        self.places = nn.Parameter(torch.randn(STEPS, DIM))
        self.block = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True, dropout=0)

    def read(self, item, history, ids):
        x = history + self.places
        behind = (ids == 0) & (torch.arange(STEPS) > 0)  # torch gives NaN where nothing may be looked at
        out = self.block(x, src_key_padding_mask=behind)
        return (out * (ids != 0).float().unsqueeze(2)).sum(1)


class Gru(Base):
    width = 5

    def made(self):
        self.gru = nn.GRU(DIM, 5, batch_first=True)

    def read(self, item, history, ids):
        return self.gru(history)[0][:, -1]


class ByTorchMax(Base):
    def read(self, item, history, ids):
        there = torch.repeat_interleave((ids != 0).unsqueeze(2).float(), DIM, dim=2)
        return torch.max(history - (1 - there) * 1e9, dim=1, keepdim=True)[0].squeeze(1).clamp(-4, 4)


class AllIdsBelowNone(Base):
    def read(self, item, history, ids):
        there = (ids != -1).float() * (ids >= 0).float()
        return (history * there.unsqueeze(2)).sum(1) / there.sum(1, keepdim=True)


class BooleanCast(Base):
    def read(self, item, history, ids):
        return (history * ids.bool().unsqueeze(2)).sum(1) + (ids > 0).sum(1, keepdim=True)


@pytest.mark.parametrize(
    "kind",
    [Flat, MaskedMean, PlainMean, Attention, Largest, ByTorchMax, ByPosition, Transformer, Gru, BooleanCast, AllIdsBelowNone],
    ids=lambda k: k.__name__,
)
def test_a_module_over_a_history_scores_as_it_did(kind):
    compiled = compile_module(kind(), schema(), example())
    assert compiled.deviation <= 1e-5
    assert compiled.golden.scores.std() > 1e-3


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
@pytest.mark.parametrize("kind", [Flat, MaskedMean, PlainMean, Attention, Gru, ByTorchMax, AllIdsBelowNone])
def test_where_a_list_has_ended_the_module_reads_the_row_of_its_padding(kind, device, policy, tmp_path):
    """As DeepCTR-Torch's and torch-rechub's tables have one: no padding_idx, no zeros. The graph has a `where` for it."""
    module = kind()
    module.table.padding_idx = None
    with torch.no_grad():
        module.table.weight[0] = 3.0
    compiled = compile_module(module, schema(), example())
    assert compiled.deviation <= 1e-5
    assert compiled.golden.scores.std() > 1e-3
    ids = compiled.golden.block.wide_ids("candidate_ids")[:, 1:]
    assert (ids == -1).any()
    assert not (ids == 0).any()
    assert "aten.where" in str(compiled.graph), "behind the lookup"
    compiled.write(tmp_path / "b", name="ended")
    scores = served_scores(tmp_path / "b", example(), device, policy=policy)
    torch.testing.assert_close(scores, called(module, example(), {}), rtol=0, atol=1e-5)


def test_the_id_of_an_absent_value_is_a_masks_or_the_schemas_or_asked_for():
    module, vocabulary = MaskedMean(), {"encoder": Hash(buckets=20, first_id=1), "padding_value": None}
    module.table.padding_idx = None
    assert compile_module(module, schema(**vocabulary), example()).deviation <= 1e-5
    unsaid = PlainMean()
    unsaid.table.padding_idx = None
    with pytest.raises(InputError, match=r"got no id of an absent value of feature 'hist', expected a padding_idx of its"):
        compile_module(unsaid, schema(**vocabulary), example())


def test_the_mask_is_read_from_the_list_and_not_from_the_embeddings():
    compiled = compile_module(MaskedMean(), schema(), example())
    sources = [s for n in compiled.graph.nodes if n.op == "lookup" for s in n.attrs.concat]
    assert ("hist", None, STEPS) in [(s.feature, s.table, s.width) for s in sources]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pooling": "sum"}, r"got a comparison of ids of feature 'hist' with pooling 'sum', expected those of a sequence"),
        ({"padding_value": None, "missing_id": 0}, r"hist"),
    ],
)
def test_a_mask_that_the_schema_cannot_say_is_refused(change, said):
    with pytest.raises(InputError, match=said):
        compile_module(MaskedMean(), schema(**change), example())


def test_a_mask_by_another_id_than_the_schemas_is_refused():
    class Wrong(Base):
        def read(self, item, history, ids):
            return (history * (ids != 3).float().unsqueeze(2)).sum(1)

    with pytest.raises(InputError, match=r"got padding_value 0 and missing_id -1 of feature 'hist', expected 3 and -1"):
        compile_module(Wrong(), schema(), example())


class WithTarget(nn.Module):
    """BST's way: the item stands behind its history, and who attends to whom is said by all ids at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table, self.places = nn.Embedding(30, DIM, padding_idx=0), nn.Parameter(torch.randn(STEPS + 1, DIM))
        self.out = nn.Linear(DIM, 1)

    def forward(self, x):
        ids = torch.cat([x["hist"], x["item"][:, None]], 1)
        steps, there = self.table(ids) + self.places, ids != 0
        scores = (steps @ steps.transpose(1, 2)).masked_fill(~there[:, None, :], -1e9)
        return torch.sigmoid(self.out((scores.softmax(2) @ steps)[:, -1]))


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
def test_ids_of_a_history_and_of_one_value_behind_it_are_compared_at_once(tmp_path, device, policy):
    plain = schema()
    wider = FeatureSchema(features=plain.features, tables=(Table(name="item", rows=30, dim=DIM + 1),))
    module, values = WithTarget().eval(), example()
    compile_module(module, wider, values).write(tmp_path / "b", name="target")
    for some in (values, values | {"item": torch.zeros(ROWS, dtype=torch.int64)}):  # an item that is none is left out, too
        got = served_scores(tmp_path / "b", some, device, policy=policy)
        torch.testing.assert_close(got.double(), exact(module, some), rtol=0, atol=1e-6)
    with pytest.raises(InputError, match=r"item"):
        compile_module(module, plain, values)
