"""A model of several tasks behind the app, an engine of its own under it: both protocols give each task its own scores."""

import httpx
import numpy as np
import pytest
import torch

from dpiframe_core import compile as compile_model
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.schema import FeatureSchema, Table
from tests.deployments.serve.test_http_app import Service
from tests.dpiframe_core.compiler.modules import categorical, example, randomised

pytestmark = pytest.mark.bulk
TASKS = ("cvr", "ctr", "ctcvr")


class Esmm(torch.nn.Module):
    """Ma et al. 2018: p(conversion | click), p(click), and their product."""

    def __init__(self):
        super().__init__()
        self.user, self.item, self.out = torch.nn.Embedding(40, 4), torch.nn.Embedding(30, 4), torch.nn.Linear(8, 2)

    def forward(self, x):
        both = torch.sigmoid(self.out(torch.cat([self.user(x["user"]), self.item(x["item"])], 1)))
        return torch.cat([both, both[:, :1] * both[:, 1:]], 1)


def test_each_task_has_its_scores_in_both_protocols(tmp_path):
    tables = (Table(name="user", rows=40, dim=4), Table(name="item", rows=30, dim=4))
    schema = FeatureSchema(features=(categorical("user", "user"), categorical("item", "item")), tables=tables)
    module = randomised(Esmm())
    compile_model(module, schema, example(schema)).write(tmp_path / "b", name="esmm", tasks=TASKS)
    sent = example(schema, 17, seed=5)
    with torch.no_grad():
        want = module(sent).numpy()
    raw = {name: v.tolist() for name, v in sent.items()}
    engine = Engine(read_bundle(tmp_path / "b"), "cpu", "fp32", EngineOptions(max_batch_rows=64, recall=False))
    engine.warmup()

    async def body(client: httpx.AsyncClient) -> None:
        [model] = (await client.get("/v1/models")).json()["models"]
        assert model["tasks"] == list(TASKS)
        got = (await client.post("/v1/score", json={"candidates": raw, "options": {"top_k": 3}})).json()
        np.testing.assert_allclose(np.stack([got["scores"][t] for t in TASKS], 1), want, rtol=0, atol=1e-5)
        assert got["top_k"]["indices"] == np.argsort(-want[:, 0], kind="stable")[:3].tolist()
        columns = [{"name": n, "datatype": "INT64", "shape": [17, 1], "data": v} for n, v in raw.items()]
        answer = (await client.post("/v2/models/esmm/infer", json={"inputs": columns})).json()
        [scores] = answer["outputs"]
        assert scores["shape"] == [17, 3]
        np.testing.assert_allclose(np.reshape(scores["data"], (17, 3)), want, rtol=0, atol=1e-5)
        assert (await client.get("/v2/models/esmm")).json()["outputs"][0]["shape"] == [-1, 3]

    try:
        Service(engine).run(body)
    finally:
        engine.close()
