"""A version that is captured, checked and released on a GPU while another one serves from it."""

import threading
from pathlib import Path

import numpy as np
import pytest

from deployments.config import parse_config
from deployments.config_models import ModelRef
from deployments.serve.loaded_models import load_engine, warm_engine
from tests.deployments.lifecycle.versions import moved, write_moved

pytestmark = pytest.mark.gpu


def test_a_version_is_captured_and_released_while_another_one_serves_the_same_device(demo_bundle: Path, tmp_path: Path) -> None:
    from dpiframe_core.bundle.bundle import read_bundle

    write_moved(demo_bundle, tmp_path / "2", "2", 0.5)
    write_moved(demo_bundle, tmp_path / "bad", "bad", 1.0, sound=False)
    batching = {"max_batch_rows": 256, "buckets": [1, 16, 256]}
    config = parse_config({"models": [{"path": str(demo_bundle)}], "device": "cuda", "batching": batching}, "test")
    first = load_engine(config, config.models[0])
    block = first.bundle.golden.block
    rows = min(block.rows, 256)
    part = block.window(0, rows)
    wanted = first.run_batch((part,)).scores.copy()
    over, runs, wrong = threading.Event(), [0, 0], []

    def serve(client: int) -> None:
        while not over.is_set():
            got = first.run_batch((part,)).scores
            runs[client] += 1
            if not np.array_equal(got, wanted):
                wrong.append(float(np.abs(got - wanted).max()))

    clients = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
    for client in clients:
        client.start()
    try:
        for _ in range(3):
            before = list(runs)
            second = load_engine(config, ModelRef(path=str(tmp_path / "2")))
            assert all(now > then for now, then in zip(runs, before, strict=True))
            got = second.run_batch((part,)).scores
            assert np.abs(got - moved(first.bundle.golden.scores[:rows], 0.5)).max() < 1e-3
            second.close()
            with pytest.raises(Exception, match="golden rows: got scores off by"):
                warm_engine(config, read_bundle(tmp_path / "bad"), None)
        first.check()
    finally:
        over.set()
        for client in clients:
            client.join(30)
        first.close()
    assert wrong == []
    assert min(runs) > 100
