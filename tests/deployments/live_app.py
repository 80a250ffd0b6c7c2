"""The real app over fake or real engines: uvicorn for HTTP and grpc.aio for gRPC, on one event loop of a thread."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import uvicorn

from deployments.access.gate import Gate
from deployments.batching.batcher import RowBatcher
from deployments.config import Limits
from deployments.metrics import RequestSeen
from deployments.protocol.grpc_service import GrpcMethods, add_to_server
from deployments.scoring.catalog import Catalog
from deployments.scoring.served_model import ServedModel
from deployments.serve.http_app import build_app
from dpiframe_core.engine.engine import Engine
from tests.deployments.serving_doubles import FakeEngine

LIMITS = Limits(max_body_bytes=200_000, max_rows_per_request=500)


def wait_until(true: Callable[[], bool]) -> None:
    """Waits for what the app's thread is about to do."""
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.001)


class LiveApp:
    """Up within its `with`. `address` and `grpc_address` are host:port."""

    def __init__(
        self,
        *engines: FakeEngine | Engine,
        limits: Limits = LIMITS,
        max_queued_rows: int = 2000,
        gate: Gate | None = None,
        profiles: Path | None = None,
    ) -> None:
        self.gate, self.profiles = gate, profiles
        self.engines = engines or (FakeEngine(),)
        self.limits, self.max_queued_rows = limits, max_queued_rows
        self.seen: list[RequestSeen] = []
        self._up: Future[tuple[int, int]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="live-app")

    def __enter__(self) -> Self:
        self._thread.start()
        http, rpc = self._up.result(30)
        self.address, self.grpc_address = f"127.0.0.1:{http}", f"127.0.0.1:{rpc}"
        self.url = f"http://{self.address}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for engine in self.engines:
            if isinstance(engine, FakeEngine):
                engine.go.set()
        self._server.should_exit = True
        self._thread.join(30)

    async def _main(self) -> None:
        try:
            self.batchers = {
                e.manifest.name: RowBatcher(
                    e.run_batch, max_batch_rows=e.max_batch_rows, lanes=e.lanes, max_queued_rows=self.max_queued_rows
                )
                for e in self.engines
            }
            self.models = {
                e.manifest.name: ServedModel.of(
                    e, self.batchers[e.manifest.name], self.limits, example=e.bundle.example if isinstance(e, Engine) else None
                )
                for e in self.engines
            }
            profiles = None if self.profiles is None else str(self.profiles)
            app = build_app(Catalog(self.models), self.limits, self.seen.append, self.gate, profiles=profiles)
            config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", access_log=False)
            self._server = server = uvicorn.Server(config)
            self.inference = app.state.inference
            methods = GrpcMethods()
            methods.inference, methods.gate = self.inference, self.gate
            rpc = grpc.aio.server(options=[("grpc.max_receive_message_length", self.limits.max_body_bytes + 65_536)])
            add_to_server(methods, rpc)
            rpc_port = rpc.add_insecure_port("127.0.0.1:0")
            await rpc.start()
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            self._up.set_result((server.servers[0].sockets[0].getsockname()[1], rpc_port))
            await serving
            await rpc.stop(1)
            for batcher in self.batchers.values():
                await batcher.close(5)
        except BaseException as error:
            if not self._up.done():
                self._up.set_exception(error)
            raise
