"""one_hot and bucketize: of ids a table of the schema, of numbers that are computed comparisons and a small table."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dpiframe_core import compile as compile_module
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema, Table
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.modules import called, categorical, randomised
from tests.dpiframe_core.compiler.operations.lowered import Lowered
from tests.dpiframe_core.compiler.operations.test_positions import Chosen, length
from tests.dpiframe_core.compiler.served import any_rows_score_as, exact, served_scores
from tests.dpiframe_core.compiler.test_sequences import GPU_ONLY, STEPS, example, schema

pytestmark = pytest.mark.bulk

HOURS, TAGS = 24, 7


class OneHot(nn.Module):
    """Hours one-hot, beside an embedding of their own; tags one-hot alone, two features by one table."""

    def __init__(self):
        super().__init__()
        self.hours, self.out = nn.Embedding(HOURS, 3), nn.Linear(3 + HOURS + 2 * TAGS, 1)

    def forward(self, x):
        hour = F.one_hot(x["hour"], HOURS).to(self.out.weight.dtype)
        tags = F.one_hot(torch.stack([x["tag"], x["last_tag"]], 1), num_classes=TAGS).flatten(1).type_as(hour)
        return torch.sigmoid(self.out(torch.cat([self.hours(x["hour"]), hour, tags], 1)))


def one_hot_schema(hours=3 + HOURS):
    features = tuple(categorical(n, t) for n, t in (("hour", "hour"), ("tag", "tag"), ("last_tag", "tag")))
    tables = Table(name="hour", rows=HOURS, dim=hours), Table(name="tag", rows=TAGS, dim=TAGS)
    return FeatureSchema(features=features, tables=tables)


def ids(rows):
    draw = torch.Generator().manual_seed(rows)
    limits = {"hour": HOURS, "tag": TAGS, "last_tag": TAGS}
    return {name: torch.randint(0, n, (rows,), generator=draw) for name, n in limits.items()}


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
def test_one_hot_of_ids_is_a_table(device, policy, tmp_path):
    module = randomised(OneHot())
    compiled = compile_module(module, one_hot_schema(), ids(19))
    torch.testing.assert_close(compiled.tables["hour"], torch.cat([torch.eye(HOURS), module.hours.weight], 1), rtol=0, atol=0)
    assert torch.equal(compiled.tables["tag"], torch.eye(TAGS))
    compiled.write(tmp_path / "b", name="one-hot")
    for rows in (1, 19):
        got = served_scores(tmp_path / "b", ids(rows), device, policy=policy)
        torch.testing.assert_close(got.double(), exact(module, ids(rows)), rtol=0, atol=1e-5)


def test_a_table_that_has_no_room_for_one_hot_is_refused():
    with pytest.raises(InputError, match=r"got 24 of one_hot.24 for table 'hour', expected 3 columns as the"):
        compile_module(randomised(OneHot()), one_hot_schema(hours=3), ids(19))


def bounds(h):
    return torch.tensor([-0.5, 0.0, 0.5], dtype=h.dtype)


CLASSES = {
    "length": lambda m, h, ids: F.one_hot(length(ids), STEPS + 1)[:, :6].to(h.dtype),
    "bucket": lambda m, h, ids: F.one_hot(torch.bucketize(h[:, 0, 0].contiguous(), bounds(h)), 6).to(h.dtype),
    "embedded": lambda m, h, ids: m.places(torch.bucketize(h[:, 0, 0].contiguous(), bounds(h)))[:, :6],
    "searched": lambda m, h, ids: m.places(torch.searchsorted(bounds(h), h[:, 0, :6].contiguous())).sum(2),
    "each step": lambda m, h, ids: F.one_hot(ids, 30).to(h.dtype).sum(1)[:, [0, 1, 3, 9, 20, 29]],
}  # fmt: skip


class Counted(Chosen):
    width = 6


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
@pytest.mark.parametrize("name", CLASSES)
def test_classes_that_are_computed_score_as_they_did(name, device, policy, tmp_path):
    """Also those of a list of ids, whose absent values are of class 0."""
    made = schema()
    if name == "each step":
        features = tuple(f.model_copy(update={"table": "all"}) if f.name == "hist" else f for f in made.features)
        made = FeatureSchema(features=features, tables=(*made.tables, Table(name="all", rows=30, dim=30)))
    module = Counted(CLASSES[name]).eval()
    compiled = compile_module(module, made, example())
    assert compiled.golden.scores.std() > 1e-3
    compiled.write(tmp_path / "b", name="classes")
    any_rows_score_as(module, tmp_path / "b", example(), device, policy)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("right", [False, True])
def test_a_bucket_is_torchs_on_its_bounds_and_for_what_is_no_number(right, device):
    bounds, nan, inf = torch.tensor([-1.0, 0.25, 0.25, 3.0]), torch.nan, torch.inf
    x = torch.tensor([[-1.0, -1.0000001, 0.25], [3.0, 3.0000002, 0.0], [nan, inf, -inf], [0.2500001, -0.0, 1e30]])
    for function in (
        lambda x: torch.bucketize(x, bounds, right=right),
        lambda x: torch.bucketize(x.mT.contiguous(), bounds, right=right, out_int32=True).transpose(0, 1),
        lambda x: torch.searchsorted(bounds, x, side="right" if right else "left"),
    ):
        assert Lowered(function, 3)(x, device).tolist() == torch.bucketize(x, bounds, right=right).tolist()
        assert Lowered(function, 3)(x[:1], device).tolist() == torch.bucketize(x[:1], bounds, right=right).tolist()


@pytest.mark.parametrize("device", BACKENDS)
def test_a_class_that_is_none_gives_no_number(device):
    x = torch.tensor([[0.0, 2], [1, 3], [-1, 0]])
    got = Lowered(lambda x: F.one_hot(x.long(), 3), 2)(x, device)
    want = torch.eye(3).repeat(3, 1, 1)[:, :2].clone()
    want[0], want[1], want[2] = torch.eye(3)[[0, 2]], torch.eye(3)[[1, 1]], torch.eye(3)[[0, 0]]
    want[1, 1], want[2, 0] = torch.nan, torch.nan
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: F.one_hot(x.long(), 1025), r"got one_hot of 1025 classes, expected 1 to 1024 \(an nn.Embedding for one_hot"),
        (lambda x: torch.searchsorted(x, x), r"got boundaries that depend on the batch, or several rows of them, expected"),
    ],
)
def test_what_is_no_small_table_is_refused(function, said):
    with pytest.raises(InputError, match=said):
        Lowered(function, 3)


def test_ids_in_buckets_are_refused():
    class Bucketed(OneHot):
        def forward(self, x):
            return super().forward(x) + torch.bucketize(x["hour"], torch.tensor([6, 18])).unsqueeze(1)

    values = ids(19)
    assert called(randomised(Bucketed()), values, {}).shape == (19, 1)
    with pytest.raises(InputError, match=r"got the ids of feature 'hour' as numbers, expected them in an embedding"):
        compile_module(randomised(Bucketed()), one_hot_schema(), values)
