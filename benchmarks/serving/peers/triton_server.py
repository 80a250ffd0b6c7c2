"""Triton Inference Server with its Python backend: `python -m benchmarks.serving.peers.triton_server BUNDLE PORT DEVICE FORM`.

Its front reads HTTP, its dynamic batcher joins requests of any number of candidates, its backend runs our encoder and
engine. The program is the one in nvidia-pytriton's wheel; pytriton's own proxy, one hop more, is left out.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.serving.peers.model import MAX_BATCH, PeerModel
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.row_block import RowBlock

TEXT = "request"  # the input that has a JSON body
_TYPES = {"context_ids": "INT32", "candidate_ids": "INT32", "context_dense": "FP32", "candidate_dense": "FP32"}
_MODEL = """import sys

sys.path[:0] = {path}  # the stub heeds no PYTHONPATH
from benchmarks.serving.peers.triton_server import TritonPythonModel
"""
_CONFIG = """backend: "python"
max_batch_size: {most}
dynamic_batching {{ }}
instance_group [ {{ count: {instances}, kind: KIND_CPU }} ]
output [ {{ name: "scores", data_type: TYPE_FP32, dims: [ -1 ] }} ]
"""
_INSTANCES = 2  # on two cores: one, and three, answer less, and so does a delay of the batcher (docs/lab-notes.md)
_INPUT = 'input [ {{ name: "{name}", data_type: TYPE_{type}, dims: {dims}, allow_ragged_batch: true }} ]\n'


class TritonPythonModel:
    """What a process of the backend makes and calls."""

    def initialize(self, args: dict[str, str]) -> None:
        torch.set_num_threads(1)
        self.model = PeerModel(os.environ["PEER_BUNDLE"], os.environ["PEER_DEVICE"])
        self.read = self.model.reader(os.environ["PEER_FORM"])

    def execute(self, requests: list[Any]) -> list[Any]:
        from triton_python_backend_utils import InferenceResponse, Tensor  # only such a process has it

        scores = self.model.scores([self._block(request) for request in requests])
        return [InferenceResponse([Tensor("scores", one[None])]) for one in scores]

    def _block(self, request: Any) -> RowBlock:
        arrays = {tensor.name(): tensor.as_numpy()[0] for tensor in request.inputs()}
        return self.read(arrays[TEXT].tobytes()) if TEXT in arrays else self.model.sections(arrays)


def repository(folder: Path, bundle: str, form: str) -> Path:
    """A model repository of one model, `demo`, whose inputs are one request's: the batcher joins requests, not rows."""
    model = folder / "demo"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(_MODEL.format(path=sys.path))
    schema = read_bundle(bundle).manifest.feature_schema
    own = PreencodedReader(schema).widths if form == "binary" else {}
    inputs = [_INPUT.format(name=name, type=_TYPES[name], dims=[-1, width]) for name, width in own.items() if width]
    inputs = inputs or [_INPUT.format(name=TEXT, type="UINT8", dims=[-1])]
    (model / "config.pbtxt").write_text(_CONFIG.format(most=MAX_BATCH, instances=_INSTANCES) + "".join(inputs))
    return folder


if __name__ == "__main__":
    bundle, port, device, form = sys.argv[1:]
    wheel = Path(str(find_spec("pytriton").origin)).parent / "tritonserver"
    with TemporaryDirectory(prefix="peer-triton-") as folder:
        backends = Path(folder) / "backends" / "python"
        backends.mkdir(parents=True)
        stub = wheel / "python_backend_stubs" / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"
        for file in (*(wheel / "backends" / "python").iterdir(), stub):
            (backends / file.name).symlink_to(file)
        command = [
            wheel / "bin" / "tritonserver", "--model-repository", repository(Path(folder) / "models", bundle, form),
            "--backend-directory", backends.parent, "--http-address", "127.0.0.1", "--http-port", port,
            "--allow-grpc", "false", "--allow-metrics", "false", "--log-info", "false",
        ]  # fmt: skip
        environment = os.environ | {
            "PEER_BUNDLE": bundle, "PEER_DEVICE": device, "PEER_FORM": form,
            "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR"),  # the stub embeds this very Python
        }  # fmt: skip
        server = subprocess.Popen(command, env=environment)
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        server.wait()
