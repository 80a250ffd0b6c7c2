"""Elements at positions that a row says by itself: the last item of a history, the best ones, rows of a small table."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dpiframe_core import compile as compile_module
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema, Numeric
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.operations.lowered import Lowered
from tests.dpiframe_core.compiler.served import any_rows_score_as, exact, served_scores
from tests.dpiframe_core.compiler.test_sequences import DIM, GPU_ONLY, STEPS, Base, example, schema

pytestmark = pytest.mark.bulk


def length(ids):
    return (ids != 0).sum(1)


def last(ids):
    return (length(ids) - 1).clamp(min=0)


def rows(h):
    return torch.arange(h.shape[0], device=h.device)


# h[rows, STEPS, DIM] of a history, and its ids -> [rows, DIM]
CHOICES = {
    "last": lambda m, h, ids: h[rows(h), last(ids)],
    "last, or the one before the first": lambda m, h, ids: h[rows(h), length(ids) - 1],
    "last by keyword sizes": lambda m, h, ids: h[torch.arange(0, h.size(0)), last(ids), :],
    "last by gather": lambda m, h, ids: h.gather(1, last(ids).view(-1, 1, 1).expand(-1, -1, DIM)).squeeze(1),
    "last by gather, repeated": lambda m, h, ids: torch.gather(h, 1, last(ids)[:, None, None].repeat(1, 1, DIM))[:, 0],
    "last of steps in front": lambda m, h, ids: h.transpose(0, 1).gather(0, last(ids)[None, :, None].expand(1, -1, DIM))[0],
    "one for each column": lambda m, h, ids: h.gather(1, (last(ids)[:, None] - torch.arange(DIM)).clamp(0)[:, None])[:, 0],
    "along the embedding": lambda m, h, ids: h.gather(2, length(ids)[:, None, None].expand(-1, STEPS, DIM)).sum(1),
    "of the first ones": lambda m, h, ids: F.pad(
        h.gather(1, last(ids).clamp(max=2)[:, None, None].expand(-1, 2, 3)).sum(1), (0, DIM - 3)
    ),
    "two": lambda m, h, ids: h[rows(h)[:, None], torch.stack([last(ids), last(ids) * 0], 1)].sum(1),
    "two of expanded rows": lambda m, h, ids: h[
        rows(h).unsqueeze(1).expand(-1, 2), (last(ids)[:, None] - torch.arange(2)).abs()
    ].sum(1),
    "a step of constant": lambda m, h, ids: h[rows(h), -1] + h[rows(h), torch.tensor(2)],
    "as integers": lambda m, h, ids: h[rows(h).long(), last(ids).int().long()],
    "of a table by its length": lambda m, h, ids: m.places(length(ids)),
    "of a constant": lambda m, h, ids: m.places.weight[length(ids)] * torch.arange(1, 8).to(h.dtype)[length(ids) - 1][:, None],
    "of a constant, selected": lambda m, h, ids: m.places.weight.index_select(0, length(ids)),
    "of a table, per step": lambda m, h, ids: (h * m.places(torch.arange(1, STEPS + 1) * (ids != 0))).sum(1),
    "of a table of all rows, indexed": lambda m, h, ids: m.places.weight.expand(h.shape[0], -1, -1)[rows(h), length(ids)],
    "of a table of all rows": lambda m, h, ids: m.places.weight[None].expand(h.shape[0], -1, -1).gather(
        1, length(ids)[:, None, None].expand(-1, 1, DIM)
    )[:, 0],
}  # fmt: skip


class Chosen(Base):
    def __init__(self, choice):
        self.choice = choice
        super().__init__()

    def made(self):
        self.places = nn.Embedding(STEPS + 1, DIM)

    def read(self, item, history, ids):
        return self.choice(self, history, ids)


@cache
def compiled_of(name):
    """The module and what it was compiled to; neither is to be changed."""
    module = Chosen(CHOICES[name]).eval()
    return module, compile_module(module, schema(), example())


@pytest.mark.parametrize("name", CHOICES)
def test_a_spelling_keeps_its_scores(name):
    module, compiled = compiled_of(name)
    want = exact(module, example())
    torch.testing.assert_close(torch.from_numpy(compiled.golden.scores).double(), want, rtol=0, atol=1e-5)
    assert want.std() > 1e-3
    assert ("aten.take_along_dim" in str(compiled.graph)) == (name != "a step of constant")


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
@pytest.mark.parametrize("name", ["last", "last by gather", "two", "of a table, per step"])
def test_a_bundle_scores_as_the_module_did_for_any_rows(name, device, policy, tmp_path):
    module, compiled = compiled_of(name)
    compiled.write(tmp_path / "b", name="chosen")
    any_rows_score_as(module, tmp_path / "b", example(), device, policy)


@pytest.mark.parametrize("device", BACKENDS)
def test_what_is_not_chosen_has_no_part_in_what_is(device):
    """A sum over all steps by weights 0 and 1 would be NaN where another step is NaN or infinite."""
    x = torch.full((3, 4, 2), torch.nan)
    x[:, 1] = float("inf")
    x[range(3), [0, 2, 3]] = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    at = torch.tensor([0.0, 2, 3])

    def choice(both):
        h, i = both[:, :8].unflatten(1, (4, 2)), both[:, 8].long()
        return h[torch.arange(both.shape[0]), i]

    got = Lowered(choice, 9)(torch.cat([x.flatten(1), at[:, None]], 1), device)
    assert got.tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("device", BACKENDS)
def test_a_position_that_is_none_gives_no_number(device):
    """torch raises for these; below 0 an index counts from the end, and gather does not. A cast goes towards 0."""
    x = torch.cat(
        [
            torch.arange(7.0).repeat(8, 1)[:, :3] + 10,
            torch.tensor([[-4.0], [-3.9], [-1], [-0.5], [2.9], [3], [9], [torch.nan]]),
        ],
        1,
    )
    by_index = Lowered(lambda x: x[:, :3][torch.arange(x.shape[0]), x[:, 3].long()], 4)(x, device)
    by_gather = Lowered(lambda x: x[:, :3].gather(1, x[:, 3:].long()), 4)(x, device)[:, 0]
    by_table = Lowered(lambda x: torch.tensor([10.0, 11, 12])[x[:, 3].long()], 4)(x, device)
    nan = torch.nan
    want = torch.tensor([nan, 10, 12, 10, 12, nan, nan, nan])
    torch.testing.assert_close(by_index, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(by_table, want, rtol=0, atol=0, equal_nan=True)
    without = torch.tensor([nan, nan, nan, 10, 12, nan, nan, nan])
    torch.testing.assert_close(by_gather, without, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
def test_the_length_may_be_a_number_of_the_request(device, policy, tmp_path):
    """As RecBole's models take it."""

    class ByLength(Base):
        def forward(self, x):
            item, history = self.table(x["item"]), self.table(x["hist"])
            at = (x["length"].long() - 1).clamp(min=0).view(-1, 1, 1).expand(-1, -1, DIM)
            return torch.sigmoid(self.out(torch.cat([item, history.gather(dim=1, index=at).squeeze(1)], 1)))

    made = schema()
    made = FeatureSchema(features=(*made.features, Numeric(name="length", scope="candidate")), tables=made.tables)
    values = example() | {"length": length(example()["hist"]).float()}
    module = ByLength().eval()
    compile_module(module, made, values).write(tmp_path / "b", name="by-length")
    got = served_scores(tmp_path / "b", values, device, policy=policy)
    torch.testing.assert_close(got.double(), exact(module, values | {"length": values["length"].double()}), rtol=0, atol=1e-5)


def test_rows_of_a_constant_by_the_numbers_of_the_rows_are_refused():
    """They would tell the rows of a batch apart."""

    class OfBatch(Base):
        def read(self, item, history, ids):
            return history[:, 0] * torch.ones(99, DIM)[rows(history)]

    with pytest.raises(InputError, match=r"got aten.index.Tensor with the rows of the batch, expected each row to be computed"):
        compile_module(OfBatch(), schema(), example())


def test_a_choice_reads_no_more_than_it_gives():
    """One node, and no sum over the steps: the repeated index is read once."""
    ops = Lowered(lambda x: x.gather(1, x[:, :1, :1].long().abs().expand(-1, 1, 3)), 4, 3).ops
    assert ops.count("aten.take_along_dim") == 1
    assert not {"aten.sum", "aten.clone", "aten.matmul"} & set(ops)


def test_the_last_id_of_a_list_is_no_value_and_the_refusal_says_so():
    class LastId(Base):
        def read(self, item, history, ids):
            return self.table(ids[rows(ids), last(ids)])

    with pytest.raises(InputError, match=r"got the ids of feature 'hist' as numbers, expected them in an embedding lookup"):
        compile_module(LastId(), schema(), example())


# h[n, 6 steps, 8] -> [n, ..]: the best steps, their order, what stands there
RANKED = {
    "largest": lambda h: h.topk(3, 1)[0],
    "smallest, keyword": lambda h: torch.topk(h, k=2, dim=-1, largest=False).values,
    "all in order": lambda h: h.topk(6, dim=1).values,
    "steps in front": lambda h: h.transpose(0, 1).topk(2, 0).values.transpose(0, 1),
    "as k-max pooling": lambda h: h.gather(1, h.topk(3, dim=1)[1].sort(dim=1)[0]),
    "soft search": lambda h: h.gather(1, (h @ h[:, 0, :, None]).squeeze(2).topk(2, 1)[1].unsqueeze(2).expand(-1, -1, 8)),
    "soft search by rows": lambda h: h[torch.arange(h.shape[0])[:, None], (h * h[:, :1]).sum(2).topk(3).indices],
    "no more than there are": lambda h: h.topk(min(10, h.shape[1]), 1).values,
    "sorted": lambda h: h.sort(2, descending=True).values - h.sort(1)[0],
    "argsort": lambda h: h.gather(1, h.argsort(1)) + h.gather(1, torch.argsort(h, dim=1, descending=True, stable=True)),
    "ranks": lambda h: h.argsort(1).argsort(1),
    "median of some": lambda h: h.sort(1).values[:, 2:4].mean(1),
}  # fmt: skip


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", RANKED)
def test_what_is_best_is_what_torch_finds(name, device):
    """NaN counts as the largest, as there; of equal numbers nothing is said."""
    lowered = Lowered(RANKED[name], 6, 8)
    for n in (1, 5):
        h = torch.randn(n, 6, 8, generator=torch.Generator().manual_seed(n))
        h[0, 2, 3], h[-1, 5, 1] = torch.inf, -torch.inf
        want = RANKED[name](h.double()).double()
        torch.testing.assert_close(lowered(h, device).double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    if not {"soft", "no"} & set(name.split()):
        h[1, 4, 2] = torch.nan
        want = RANKED[name](h.double()).double()
        torch.testing.assert_close(lowered(h, device).double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)


class Searched(Base):
    """SIM's soft search: the steps most like the item, and attention over them alone."""

    def read(self, item, history, ids):
        like = (history @ item.unsqueeze(2)).squeeze(2).masked_fill(ids == 0, -1e9)
        found = like.topk(3, dim=1)
        best = history.gather(1, found.indices.unsqueeze(2).expand(-1, -1, DIM))
        return (found.values.softmax(1).unsqueeze(2) * best).sum(1)


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
def test_a_search_in_the_history_scores_as_it_did(device, policy, tmp_path):
    module = Searched().eval()
    compile_module(module, schema(), example()).write(tmp_path / "b", name="searched")
    any_rows_score_as(module, tmp_path / "b", example(), device, policy)  # the first history is empty, others have few steps


def test_what_nobody_reads_of_a_ranking_is_not_computed():
    compiled = compile_module(Chosen(lambda m, h, ids: h.topk(2, 1)[0].sum(1)).eval(), schema(), example())
    ops = [n.attrs.aten.op for n in compiled.graph.nodes if n.op == "aten"]
    assert [op for op in ops if "topk" in op] == ["aten.topk"]


def test_the_best_rows_of_a_batch_are_refused():
    with pytest.raises(InputError, match="got an operation along the batch, expected each row to be computed from itself"):
        Lowered(lambda h: h + h.topk(1, 0).values, 6, 8)
