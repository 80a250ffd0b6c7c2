"""Stock Ray Serve as its documentation has it: its own proxy, FastAPI with a pydantic body, `@serve.batch` with a 2 ms window.

`python -m benchmarks.serving.peers.ray_serve BUNDLE PORT DEVICE FORM`. The batch limit counts requests; one replica.
"""

import asyncio
import os
import signal
import sys
import tempfile

import ray
from fastapi import FastAPI, Request, Response
from ray import serve

from benchmarks.serving.peers.model import MAX_BATCH, MAX_WAIT_MS, PeerModel
from benchmarks.serving.peers.uvicorn_fastapi import ColumnsBody, RowsBody
from deployments.serve.host import free_ports
from dpiframe_core.features.row_block import Floats, RowBlock

app = FastAPI()


@serve.deployment(max_ongoing_requests=256)
@serve.ingress(app)
class Scorer:
    def __init__(self, bundle: str, device: str) -> None:
        self.model = PeerModel(bundle, device)

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=MAX_WAIT_MS / 1e3)
    async def scores(self, blocks: list[RowBlock]) -> list[Floats]:
        return await asyncio.to_thread(self.model.scores, blocks)

    @app.post("/rows")
    async def rows(self, body: RowsBody) -> dict[str, list[float]]:
        return {"scores": (await self.scores(self.model.rows(body.__dict__))).tolist()}

    @app.post("/columns")
    async def columns(self, body: ColumnsBody) -> dict[str, list[float]]:
        return {"scores": (await self.scores(self.model.columns(body.__dict__))).tolist()}

    @app.post("/binary")
    async def binary(self, request: Request) -> Response:
        return Response((await self.scores(self.model.binary(await request.body()))).tobytes())


if __name__ == "__main__":
    bundle, port, device, _ = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="peer-ray-", dir="/tmp", ignore_cleanup_errors=True) as state:
        ray.init(
            address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=state,
            _node_ip_address="127.0.0.4", num_cpus=max(2, os.cpu_count() or 1), _metrics_export_port=free_ports(1)[0],
            num_gpus=1 if device == "cuda" else 0, object_store_memory=80 * 2**20,
        )  # fmt: skip
        serve.start(http_options={"host": "127.0.0.1", "port": int(port)}, proxy_location="HeadOnly")
        options = {"num_gpus": 1} if device == "cuda" else {}
        serve.run(Scorer.options(ray_actor_options=options).bind(bundle, device), logging_config={"enable_access_log": False})
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
        serve.shutdown()
        ray.shutdown()
