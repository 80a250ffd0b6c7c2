"""From when to when a lane of a GPU runs batches, and on what: without a device."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dpiframe_core.engine import cuda_lane
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.errors import Unavailable

BUCKETS = (64, 1024, 4096)


def test_a_lane_runs_batches_from_when_all_its_buckets_are_ready_until_it_is_closed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_lane, "loading", lambda sources: nullcontext())
    monkeypatch.setattr(cuda_lane, "batch_runner", lambda buckets: buckets)
    monkeypatch.setattr(cuda_lane, "give_back", lambda streams, device: None)
    ready, stream = {rows: Mock() for rows in BUCKETS}, Mock(cuda_stream=22)
    own = SimpleNamespace(
        buckets=BUCKETS, _ready=[], _copied={}, _run=cuda_lane._not_ready, _streams=[stream], _device=None, _staging=Mock(),
        _done="done", _result="scores", _workspace=None, _on_device=None, _sources=list, _issuing=nullcontext,
        _compile_regions=lambda: None, _prepared=lambda rows, pool: ready[rows],
    )  # fmt: skip
    CudaLane.prepare(own)
    got = own._run
    assert list(got.ready.items()) == list(ready.items())
    assert got.copied is own._copied
    assert (got.staging, got.done, got.scores, got.stream) == (own._staging, "done", "scores", 22)
    CudaLane.close(own)
    assert all(bucket.release.called for bucket in ready.values())
    with pytest.raises(Unavailable, match="expected none before it is prepared and after it is closed"):
        own._run([], False)


@pytest.mark.parametrize("several", [False, True])
def test_where_there_are_several_gpus_a_batch_runs_with_the_lanes_own_as_the_current_one(several, monkeypatch):
    entered, ran = [], []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    own = SimpleNamespace(
        _generation=0, _several=several, _device="cuda:1", _copied={}, _overlaps=None,
        _run=lambda *given: ran.append((*given, *entered)),
    )  # fmt: skip
    CudaLane.run(own, ["block"])
    assert ran == [(["block"], False, *["cuda:1"] * several)]
