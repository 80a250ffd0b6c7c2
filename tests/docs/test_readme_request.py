"""The request that the README shows is one that the demo's service answers, as it stands there."""

import json
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa

from deployments.config import Limits
from dpiframe_core.engine import Engine
from tests.deployments.live_app import LiveApp
from tests.docs.test_readme import BLOCKS


def test_the_request_of_the_readme_is_answered_by_the_demo(demo_bundle: Path) -> None:
    (text,) = (block.code for block in BLOCKS if block.language == "json")
    request = json.loads(text)
    deadline = '"deadline_ms": 50,'
    assert deadline in text
    text = text.replace(deadline, '"deadline_ms": 20000,')  # a busy host may be late; what is late is refused with 504
    engine = Engine.load(demo_bundle, "cpu")
    engine.warmup()
    with LiveApp(engine, limits=Limits()) as live:
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"http://{live.address}/v1/score", content=text, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() >= {"scores", "model", "version", "request_id", "oov_count", "timing_ms"}
    candidates, context = request["candidates"], request["context"]
    wanted = engine.score(candidates, context)
    np.testing.assert_allclose(answer.json()["scores"], wanted[:, 0], rtol=0, atol=1e-6)
    rows = [dict(zip(candidates, values, strict=True)) for values in zip(*candidates.values(), strict=True)]
    for form in (rows, pa.table(candidates), pa.RecordBatch.from_pydict(candidates)):
        np.testing.assert_array_equal(engine.score(form, context), wanted)
    engine.close()
