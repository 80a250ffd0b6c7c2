"""LitServe with its batching and its fast queue: `python -m benchmarks.serving.peers.litserve_api BUNDLE PORT DEVICE FORM`.

Its requests are JSON, forms or pydantic models: there is no binary body.
"""

import sys

import litserve
import torch

from benchmarks.serving.peers.model import MAX_BATCH, MAX_WAIT_MS, PeerModel
from dpiframe_core.features.row_block import Floats, RowBlock


class Scorer(litserve.LitAPI):
    def __init__(self, bundle: str, device: str, form: str) -> None:
        super().__init__(max_batch_size=MAX_BATCH, batch_timeout=MAX_WAIT_MS / 1e3, api_path="/score")
        self.arguments = bundle, device, form

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        bundle, own, form = self.arguments
        self.model = PeerModel(bundle, own)
        self.read = self.model.rows if form == "rows" else self.model.columns

    def decode_request(self, request):  # an annotation would make FastAPI read the body as that type
        return self.read(request)

    def batch(self, inputs: list[RowBlock]) -> list[RowBlock]:
        return inputs

    def predict(self, x: list[RowBlock]) -> list[Floats]:
        return self.model.scores(x)

    def unbatch(self, output: list[Floats]) -> list[Floats]:
        return output

    def encode_response(self, output: Floats) -> dict[str, list[float]]:
        return {"scores": output.tolist()}


if __name__ == "__main__":
    bundle, port, device, form = sys.argv[1:]
    api = Scorer(bundle, device, form)
    server = litserve.LitServer(api, accelerator="cuda" if device == "cuda" else "cpu", devices=1, fast_queue=True)
    server.run(host="127.0.0.1", port=int(port), log_level="warning", generate_client_file=False)
