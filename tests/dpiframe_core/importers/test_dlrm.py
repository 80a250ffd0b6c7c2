"""DLRM state dicts under the names of TorchRec and of facebookresearch/dlrm, against plain modules of those names.

Neither library is installed here (TorchRec needs FBGEMM, the other is a repository): the modules below are their papers'
formulas with the parameters where they have them.
"""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from deployments.cli.main import app
from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import InputError
from dpiframe_core.importers.dlrm import facebook_dlrm, torchrec
from dpiframe_core.importers.raw_rows import random_rows
from dpiframe_core.importers.writing import write_import

SIZES, DIM, NUMBERS = (11, 5, 7), 6, 3


class Perceptron(nn.Module):
    def __init__(self, width, units):
        super().__init__()
        self._linear = nn.Linear(width, units)

    def forward(self, x):
        return torch.relu(self._linear(x))


class Mlp(nn.Module):
    def __init__(self, width, units):
        super().__init__()
        sizes = [width, *units]
        self._mlp = nn.Sequential(*(Perceptron(a, b) for a, b in pairwise(sizes)))

    def forward(self, x):
        return self._mlp(x)


class Holder(nn.Module):
    """A module that only gives its children their place in a name."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class LowRank(nn.Module):
    def __init__(self, width, layers, rank):
        super().__init__()
        self.W_kernels = nn.ParameterList(nn.Parameter(torch.randn(width, rank) / rank) for _ in range(layers))
        self.V_kernels = nn.ParameterList(nn.Parameter(torch.randn(rank, width) / width**0.5) for _ in range(layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.randn(width) * 0.1) for _ in range(layers))

    def forward(self, x0):
        x = x0
        for w, v, b in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            x = x0 * ((w @ (v @ x.T)).T + b) + x
        return x


class TorchRec(nn.Module):
    """torchrec.models.dlrm: DLRM, and with a rank DLRM_DCN."""

    def __init__(self, bottom, over, rank=None):
        super().__init__()
        bags = nn.ModuleDict({f"t_{i}": nn.EmbeddingBag(n, DIM, mode="sum") for i, n in enumerate(SIZES)})
        self.sparse_arch = Holder(embedding_bag_collection=Holder(embedding_bags=bags))
        self.dense_arch = Holder(model=Mlp(NUMBERS, [*bottom, DIM]))
        count = len(SIZES) + 1
        width = count * DIM if rank else DIM + count * (count - 1) // 2
        if rank:
            self.inter_arch = Holder(crossnet=LowRank(width, 2, rank))
        self.over_arch = Holder(model=nn.Sequential(Mlp(width, over), nn.Linear(([width, *over])[-1], 1)))
        self.rank = rank

    def forward(self, numbers, bags):
        z = self.dense_arch.model(numbers)
        tables = self.sparse_arch.embedding_bag_collection.embedding_bags.values()
        vectors = torch.stack([z, *pooled(tables, bags)], 1)
        if self.rank:
            x = self.inter_arch.crossnet(vectors.flatten(1))
        else:
            dots = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(len(SIZES) + 1) for j in range(i + 1, len(SIZES) + 1)]
            x = torch.cat([z, torch.stack(dots, 1)], 1)
        return torch.sigmoid(self.over_arch.model(x))


class Facebook(nn.Module):
    """dlrm_s_pytorch.DLRM_Net: EmbeddingBags that sum, two `nn.Sequential`s, a sigmoid in the last."""

    def __init__(self, bottom, top, itself):
        super().__init__()
        count = len(SIZES) + 1
        width = DIM + count * (count - 1) // 2 + (count if itself else 0)
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, DIM, mode="sum") for n in SIZES)
        self.bot_l, self.top_l = sequence([NUMBERS, *bottom, DIM]), sequence([width, *top, 1], nn.Sigmoid())
        self.itself = itself

    def forward(self, numbers, bags):
        z = self.bot_l(numbers)
        vectors = torch.stack([z, *pooled(self.emb_l, bags)], 1)
        own = 1 if self.itself else 0
        dots = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(len(SIZES) + 1) for j in range(i + own)]
        return self.top_l(torch.cat([z, torch.stack(dots, 1)], 1))


def sequence(sizes, last=None):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last) if last else nn.Sequential(*layers)


def pooled(tables, bags):
    for table, bag in zip(tables, bags, strict=True):
        yield torch.stack([table.weight[torch.tensor(ids, dtype=torch.long)].sum(0) for ids in bag])


def spec(model, tables, **settings):
    """The numbers come last on purpose: their place in a spec is free."""
    bags = [{"name": f"s{i}", "max_values": 4 if i == 1 else 1} | ({"table": f"t_{i}"} if tables else {}) for i in range(3)]
    logged = [{"type": "log"}]
    numbers = [{"kind": "dense", "name": f"n{i}", "transforms": logged, "missing_value": 0.0} for i in range(NUMBERS)]
    return {"model": model, "features": [*bags, *numbers], "settings": settings}


def own_scores(model, rows):
    numbers = np.log1p(np.maximum(np.array([[v or 0 for v in rows[f"n{i}"]] for i in range(NUMBERS)], np.float64), 0)).T
    bags = [[v if isinstance(v, list) else [0] if v is None and i != 1 else [v] if v is not None else [] for v in rows[f"s{i}"]]
            for i in range(3)]  # fmt: skip
    with torch.no_grad():
        return model(torch.from_numpy(numbers).float(), bags).numpy()[:, 0]


def check(tmp_path, read, model, given, state=None):
    torch.manual_seed(3)
    torch.save(state or model.state_dict(), tmp_path / "c.pt")
    (tmp_path / "spec.yaml").write_text(json.dumps(given))
    source = read(tmp_path / "c.pt", tmp_path / "spec.yaml")
    rows = random_rows(source.schema, {}, 100)
    own = own_scores(model, rows)
    write_import(source, tmp_path / "b")
    engine = Engine.load(tmp_path / "b", "cpu")
    engine.warmup()
    assert own.std() > 1e-3
    assert np.abs(engine.score(rows)[:, 0] - own).max() <= 1e-5
    engine.close()


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize(("bottom", "over"), [([], [8]), ([9, 7], [8, 5])])
def test_torchrec(tmp_path, bottom, over, rank):
    model = TorchRec(bottom, over, rank)
    check(tmp_path, torchrec, model, spec("DLRM_DCN" if rank else "DLRM", True))


def test_torchrec_inside_its_training_module(tmp_path):
    model = TorchRec([9], [8], 4)
    check(tmp_path, torchrec, model, spec("DLRM_DCN", True), {f"model.{k}": v for k, v in model.state_dict().items()})


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize(("bottom", "top"), [([], []), ([9, 7], [8, 5])])
def test_facebook(tmp_path, bottom, top, itself):
    settings = {"arch_interaction_op": "dot", "arch_interaction_itself": itself}
    model = Facebook(bottom, top, itself)
    saved = {"epoch": 0, "state_dict": model.state_dict()}
    check(tmp_path, facebook_dlrm, model, spec("DLRM_Net", False, **settings), saved)


@pytest.mark.parametrize(("command", "model", "given"), [
    ("torchrec", TorchRec([9], [8]), spec("DLRM", True)),
    ("dlrm", Facebook([9], [8], False), spec("DLRM_Net", False, arch_interaction_op="dot", arch_interaction_itself=False)),
])  # fmt: skip
def test_the_commands(tmp_path, command, model, given):
    torch.save(model.state_dict(), tmp_path / "c.pt")
    (tmp_path / "spec.yaml").write_text(json.dumps(given))
    args = ["import", command, str(tmp_path / "c.pt"), "--spec", str(tmp_path / "spec.yaml"), "-o", str(tmp_path / "b")]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "b" / "model.yaml").exists()


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    model = TorchRec([9], [8])

    def refused(pattern, given, change=None):
        state = dict(model.state_dict())
        if change:
            change(state)
        torch.save(state, tmp_path / "c.pt")
        (tmp_path / "spec.yaml").write_text(json.dumps(given))
        with pytest.raises(InputError, match=pattern):
            torchrec(tmp_path / "c.pt", tmp_path / "spec.yaml")

    refused(r"spec\.yaml: model: got 'DLRM_Projection', expected one of DLRM, DLRM_DCN", spec("DLRM_Projection", True))
    refused(r"embedding_bags\.s0\.weight: got 'no such parameter'", spec("DLRM", False))
    refused(r"inter_arch\.crossnet: got 'no layers', expected those of a LowRankCrossNet", spec("DLRM_DCN", True))
    refused(r"settings: got 'rank', expected only what DLRM does not keep", spec("DLRM", True, rank=3))
    few = spec("DLRM", True)
    few["features"].pop(0)
    refused(r"over_arch\.model\.0\._mlp\.0\._linear\.weight: got 'shape \[8, 12\]', expected \[any, 9\]", few)
    refused(r"got '1 parameters left over', expected a place in TorchRec's DLRM .* for gate", spec("DLRM", True),
            lambda s: s.update(gate=torch.ones(1)))  # fmt: skip
    refused(r"spec\.yaml: features\.0\.\w+\.rows: got 3, expected no such key", spec("DLRM", True) | {
        "features": [{"name": "s0", "rows": 3}]})  # fmt: skip
