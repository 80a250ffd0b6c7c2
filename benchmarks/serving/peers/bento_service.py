"""BentoML with adaptive batching: `python -m benchmarks.serving.peers.bento_service BUNDLE PORT DEVICE FORM`.

What its batching joins are lists, so a client's body is {"requests": [the usual one]}. Its APIs take no raw binary body.
"""

import os
import sys
from typing import Any

import bentoml
import torch

from benchmarks.serving.peers.model import MAX_BATCH, PeerModel


@bentoml.service(workers=1, traffic={"timeout": 30, "max_concurrency": 1024})
class Scorer:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = PeerModel(os.environ["PEER_BUNDLE"], os.environ["PEER_DEVICE"])
        self.read = self.model.rows if os.environ["PEER_FORM"] == "rows" else self.model.columns

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH, max_latency_ms=2000, route="/score")
    def score(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        return [scores.tolist() for scores in self.model.scores([self.read(request) for request in requests])]


if __name__ == "__main__":
    bundle, port, device, form = sys.argv[1:]
    os.environ |= {"PEER_BUNDLE": bundle, "PEER_DEVICE": device, "PEER_FORM": form, "BENTOML_DO_NOT_TRACK": "True"}
    name = "benchmarks.serving.peers.bento_service:Scorer"
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", "serve", name, "--port", port, "--host", "127.0.0.1"])
