"""Triton through nvidia-pytriton, dynamic batching on: `python -m benchmarks.serving.peers.triton_server BUNDLE PORT DEVICE
FORM`. It batches along the first dimension, so a client repeats the context on every row."""

import signal
import sys
import tempfile

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.serving.peers.model import MAX_WAIT_MS, PeerModel

_DTYPES = {"candidate_ids": np.int32, "context_ids": np.int32, "candidate_dense": np.float32, "context_dense": np.float32}


if __name__ == "__main__":
    bundle, port, device, _ = sys.argv[1:]
    torch.set_num_threads(1)
    model = PeerModel(bundle, device)
    widths = {name: width for name, width in model._encoded.widths.items() if width}

    @batch
    def infer(**arrays):
        return [np.ascontiguousarray(model.scores([model.sections(arrays)])[0][:, None])]

    with tempfile.TemporaryDirectory(prefix="peer-triton-") as workspace:
        config = TritonConfig(
            http_address="127.0.0.1", http_port=int(port), allow_grpc=False, allow_metrics=False, log_verbose=0,
        )  # fmt: skip
        with Triton(config=config, workspace=f"{workspace}/w") as triton:
            triton.bind(
                model_name="demo",
                infer_func=infer,
                inputs=[Tensor(name=name, dtype=_DTYPES[name], shape=(width,)) for name, width in widths.items()],
                outputs=[Tensor(name="scores", dtype=np.float32, shape=(1,))],
                config=ModelConfig(
                    max_batch_size=4096, batcher=DynamicBatcher(max_queue_delay_microseconds=MAX_WAIT_MS * 1000)
                ),
            )
            triton.run()
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
