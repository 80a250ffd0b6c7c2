"""Models of several tasks, compiled and served: float32[rows, tasks] as the libraries' own forward gives them."""

import pytest
import torch

from dpiframe_core import compile as compile_model
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema, Numeric, Table
from tests.dpiframe_core.compiler.modules import categorical, example, randomised
from tests.dpiframe_core.compiler.served import served
from tests.dpiframe_core.compiler.test_peers import ROWS, fuxictr_parts, library

pytestmark = pytest.mark.bulk
DEVICES = [("cpu", "auto"), *(pytest.param("cuda:0", p, marks=pytest.mark.gpu) for p in ("waves", "regions", "sequential"))]


def lively(module):
    """Random weights with which experts, gates and towers, one behind the other, still tell rows apart."""
    made = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for m in randomised(module).modules():
            if isinstance(m, torch.nn.BatchNorm1d):
                m.weight.copy_(1 + 0.2 * torch.randn(m.weight.shape, generator=made))
        for p in module.parameters():
            p.mul_(1.4 if p.ndim > 1 else 1.0)
    return module


def agrees(module, schema, tmp_path, device, policy, tasks, **options):
    """The served scores of fresh rows, in batches of several sizes, against the module's own forward."""
    compiled = compile_model(module, schema, example(schema, 37, seed=1), **options)
    compiled.write(tmp_path / "bundle", name="peer", tasks=tasks)
    with served(tmp_path / "bundle", device, policy=policy) as scores:
        for rows, seed in ((1, 2), (19, 3), (64, 4)):
            fresh = example(schema, rows, seed)
            with torch.no_grad():
                found = module(fresh)
            want = torch.cat(list(found.values()), 1) if isinstance(found, dict) else found
            assert want.shape == (rows, len(tasks))
            assert rows == 1 or bool((want.std(0) > 1e-3).all()), "scores that are all alike would prove nothing"
            assert rows == 1 or bool((want[:, 0] - want[:, 1]).abs().max() > 1e-2), "tasks that are alike would prove nothing"
            torch.testing.assert_close(scores(fresh), want, rtol=0, atol=1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("device", "policy"), DEVICES)
@pytest.mark.parametrize("dim", [4, 10])
@pytest.mark.parametrize("name", ["MMOE", "PLE", "SharedBottom", "ESMM"])
def test_torch_rechub_scores_every_task(name, dim, device, policy, tmp_path):
    library("torch_rechub")
    from torch_rechub.basic.features import DenseFeature, SparseFeature

    from tests.dpiframe_core.compiler.multitask import rechub_model

    features = [categorical(n, n) for n in ROWS]
    columns = [SparseFeature(n, rows, embed_dim=dim) for n, rows in ROWS.items()]
    if name != "ESMM":  # whose towers take embeddings alone
        features += [Numeric(name="age"), Numeric(name="price")]
        columns += [DenseFeature("age"), DenseFeature("price")]
    schema = FeatureSchema(features=tuple(features), tables=tuple(Table(name=n, rows=r, dim=dim) for n, r in ROWS.items()))
    tasks = ("cvr", "ctr", "ctcvr") if name == "ESMM" else ("click", "buy")
    agrees(lively(rechub_model(name, columns)), schema, tmp_path, device, policy, tasks)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("device", "policy"), DEVICES)
@pytest.mark.parametrize(("dim", "batch_norm"), [(4, False), (16, True)])
@pytest.mark.parametrize("name", ["ShareBottom", "MMoE", "PLE"])
def test_fuxictr_scores_every_task(name, dim, batch_norm, device, policy, tmp_path):
    features, schema = fuxictr_parts(dim)
    from tests.dpiframe_core.compiler import multitask

    module = lively(getattr(multitask, name)(features, dim, batch_norm=batch_norm))
    agrees(module, schema, tmp_path, device, policy, multitask.LABELS, output=[f"{n}_pred" for n in multitask.LABELS])


def test_outputs_that_were_not_chosen_and_names_that_do_not_fit_are_said(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.out = torch.nn.Embedding(40, 4), torch.nn.Linear(4, 2)

        def forward(self, x):
            a, b = self.out(self.user(x["user"])).sigmoid().split(1, 1)
            return {"a": a, "b": b}

    schema = FeatureSchema(features=(categorical("user", "user"),), tables=(Table(name="user", rows=40, dim=4),))
    module, rows = randomised(Two()), example(schema)
    with pytest.raises(InputError, match=r"module output: got '2 values', expected `output`: one of \['a', 'b'\], or a list"):
        compile_model(module, schema, rows)
    compiled = compile_model(module, schema, rows, output=("b", "a"))
    with torch.no_grad():
        want = module(rows)
    torch.testing.assert_close(torch.from_numpy(compiled.golden.scores), torch.cat([want["b"], want["a"]], 1), rtol=0, atol=0)
    with pytest.raises(InputError, match=r"tasks: got \('b',\), expected 2 names, one for each score"):
        compiled.write(tmp_path / "x", name="two", tasks=("b",))
    assert compiled.write(tmp_path / "b", name="two").tasks == ("b", "a")
