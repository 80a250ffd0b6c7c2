"""Look-ups that a module writes as an index of its weights, and masks of ids in other words."""

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_module
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table
from tests.dpiframe_core.compiler.modules import randomised
from tests.dpiframe_core.compiler.served import exact, served

pytestmark = pytest.mark.bulk

PLAIN = {"values": "int", "encoder": Identity()}
STEPS = {"max_values": 5, "pooling": "none", "missing_id": -1, "padding_value": 0}
SCHEMA = FeatureSchema(
    features=(
        Categorical(name="user", table="user", missing_id=0, **PLAIN),
        Categorical(name="domain", table="domain", missing_id=0, **PLAIN),
        Categorical(name="hist", table="item", **PLAIN, **STEPS),
        Numeric(name="age"),
    ),
    tables=(Table(name="user", rows=40, dim=9), Table(name="domain", rows=4, dim=32), Table(name="item", rows=60, dim=8)),
)


def example(rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hist = torch.randint(1, 60, (rows, 5), generator=draw)
    for row in range(rows):
        hist[row, (row * 2) % 6 :] = 0
    user, domain = torch.randint(0, 40, (rows,), generator=draw), torch.randint(0, 4, (rows,), generator=draw)
    return {"user": user, "domain": domain, "hist": hist, "age": torch.rand(rows, generator=draw)}


class Chosen(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.users, self.items, self.mask = nn.Embedding(40, 8), nn.Parameter(torch.zeros(60, 8)), mask
        self.bias, self.layers, self.out = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(4, 8, 4)), nn.Linear(5, 1)

    def forward(self, x):
        hist, user = self.items[x["hist"]], self.users.weight[x["user"]]
        hist = self.mask(x["hist"], hist)
        layer = torch.index_select(self.layers, 0, x["domain"])
        made = torch.bmm((hist.sum(1) + user).unsqueeze(1), layer).squeeze(1)
        return torch.sigmoid(self.out(torch.cat([made, x["age"].unsqueeze(1)], 1)).squeeze(1) + self.bias[x["user"]])


def put(ids, h):
    h = h * 1
    h[ids == 0] = 0.25
    return h


MASKS = {
    "below one": lambda ids, h: h.masked_fill((ids < 1).unsqueeze(2), 0.5),
    "at most nought": lambda ids, h: h * (~(ids <= 0)).unsqueeze(2),
    "not 0.": lambda ids, h: h * (ids != 0.0).unsqueeze(2),
    "none is below 0": lambda ids, h: h * (ids < 0).logical_not().unsqueeze(2),
    "put where it says": put,
}


@pytest.mark.parametrize("name", MASKS)
def test_weights_chosen_by_ids_score_as_they_did(name, tmp_path):
    module = randomised(Chosen(MASKS[name]))
    compile_module(module, SCHEMA, example(24)).write(tmp_path / "b", name="chosen")
    with served(tmp_path / "b") as scores:
        for rows in (1, 30, 64):
            values = example(rows, seed=rows)
            got = scores(values).double().flatten()
            torch.testing.assert_close(got, exact(module, values).flatten(), rtol=0, atol=1e-5)


class Switched(nn.Module):
    """Of several domains, each with a layer of its own; a user of id 0 is nobody."""

    def __init__(self):
        super().__init__()
        self.users, self.first, self.other = nn.Embedding(40, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.out = nn.Linear(5, 1)

    def forward(self, x):
        domain, user = x["domain"], self.users(x["user"]) * (x["user"] != 0).float().unsqueeze(1)
        made = torch.where((domain == 3).unsqueeze(1), self.first(user), self.other(user))
        made = made * (1 + 2 * (domain <= 1).float()[:, None]) + (domain.unsqueeze(1) > 2)
        return torch.sigmoid(self.out(torch.cat([made, x["age"].unsqueeze(1)], 1)))


def test_ids_of_one_value_are_compared_with_any(tmp_path):
    tables = (Table(name="user", rows=40, dim=9), Table(name="domain", rows=4, dim=3))
    schema = FeatureSchema(features=(*SCHEMA.features[:2], SCHEMA.features[3]), tables=tables)
    module = randomised(Switched())
    values = {name: value for name, value in example(24).items() if name != "hist"}
    compile_module(module, schema, values).write(tmp_path / "b", name="switched")
    with served(tmp_path / "b") as scores:
        for rows in (1, 30, 64):
            values = {name: value for name, value in example(rows, seed=rows).items() if name != "hist"}
            got = scores(values).double().flatten()
            torch.testing.assert_close(got, exact(module, values).flatten(), rtol=0, atol=1e-5)


class Tasks(nn.Module):
    def __init__(self, joined):
        super().__init__()
        self.users, self.out, self.joined = nn.Embedding(40, 8), nn.Linear(8, 2), joined

    def forward(self, x):
        return self.joined(torch.sigmoid(self.out(self.users(x["user"]))).unbind(1))


@pytest.mark.parametrize("joined", [torch.stack, lambda tasks: torch.stack(tasks, 1)[None]])
def test_scores_that_are_not_of_each_row_are_refused(joined):
    schema = FeatureSchema(features=SCHEMA.features[:1], tables=(Table(name="user", rows=40, dim=8),))
    with pytest.raises(InputError, match=r"module output: got \[.*\], expected scores of each of the 24 rows"):
        compile_module(randomised(Tasks(joined)), schema, {"user": example(24)["user"]})
