"""mosec: a Rust front and dynamic batching before PEER_WORKERS Python workers, or one.

`python -m benchmarks.serving.peers.mosec_worker BUNDLE PORT DEVICE FORM`.
"""

import os
import sys
from typing import Any

import torch
from mosec import Server, Worker

from benchmarks.serving.peers.model import MAX_BATCH, MAX_WAIT_MS, PeerModel
from dpiframe_core.features.row_block import Floats, RowBlock


class Scorer(Worker):
    """Runs in a process of its own, which gets its arguments in the environment."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = PeerModel(os.environ["PEER_BUNDLE"], os.environ["PEER_DEVICE"])
        self.form = os.environ["PEER_FORM"]
        self.read = self.model.reader(self.form)

    def deserialize(self, data: bytes) -> RowBlock:
        return self.read(data)

    def forward(self, data: list[RowBlock]) -> list[Floats]:
        return self.model.scores(data)

    def serialize(self, data: Floats) -> Any:
        return data.tobytes() if self.form == "binary" else super().serialize({"scores": data.tolist()})


if __name__ == "__main__":
    bundle, port, device, form = sys.argv[1:]
    sys.argv = [sys.argv[0], "--address", "127.0.0.1", "--port", port, "--log-level", "warning", "--timeout", "30000"]
    server = Server()
    environment = {"PEER_BUNDLE": bundle, "PEER_DEVICE": device, "PEER_FORM": form}
    workers = int(os.environ.get("PEER_WORKERS", "1"))
    waits = {"max_batch_size": MAX_BATCH, "max_wait_time": MAX_WAIT_MS}
    server.append_worker(Scorer, num=workers, env=[environment] * workers, route="/score", **waits)
    server.run()
