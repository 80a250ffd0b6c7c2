"""One Serve replica: the engines of a deployment's models, a row batcher before each, and the FastAPI app in front of them.

The constructor returns only when every model is loaded, verified and warm, since HAProxy routes to whatever Serve calls started.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ray import serve

from deployments.batching import RowBatcher
from deployments.config import DeploymentConfig, ModelRef
from dpiframe_core.errors import ConfigError

if TYPE_CHECKING:
    from deployments.ingress import Served
    from dpiframe_core.engine import Engine


# The app depends on the models' schemas, so Serve takes it from `__serve_build_asgi_app__` after the constructor.
# Passing an async function to `serve.ingress` instead would make Serve call it as a builder.
@serve.ingress()
class Replica:
    """Serves every model of one configuration from one process, on one whole GPU or on the CPU."""

    async def __init__(self, config: DeploymentConfig) -> None:
        logging.getLogger("deployments").setLevel(config.log_level.upper())
        logging.getLogger("dpiframe_core").setLevel(config.log_level.upper())
        self._config = config
        self._engines: list["Engine"] = []
        self._models: dict[str, "Served"] = {}
        for ref in config.models:
            # Off the event loop: a load may take minutes, and a blocked loop answers no stop request.
            engine = await asyncio.to_thread(self._load, ref)
            self._engines.append(engine)
            name = ref.name or engine.manifest.name
            if name in self._models:
                raise ConfigError(f"models: got {name!r} twice, expected distinct names (give one of them a `name`)")
            self._models[name] = self._serve(ref, engine)

    def _load(self, ref: ModelRef) -> "Engine":
        # Here and not above: torch takes seconds to import, and the launcher, which imports this module, has no use for it.
        from dpiframe_core.engine import Engine

        batching = self._config.batching
        engine = Engine.load(
            ref.path,
            self._config.device,
            self._config.precision,
            max_batch_rows=batching.max_batch_rows,
            lanes=batching.lanes,
        )
        engine.warmup()
        return engine

    def _serve(self, ref: ModelRef, engine: "Engine") -> "Served":
        from deployments.ingress import Served

        return Served(engine)

    def __serve_build_asgi_app__(self) -> Any:
        from deployments.ingress import build_app

        return build_app(self._models, self._config.limits)

    async def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced. A failed CUDA context never recovers in its process."""
        for engine in self._engines:
            engine.check_health()

    def __del__(self) -> None:
        for engine in self._engines:
            engine.close()
