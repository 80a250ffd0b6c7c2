"""A shard of the rows that replicas have in no memory, as a Serve deployment without a GPU: Serve places, restarts and counts
such processes, and says where one is. Rows themselves do not go through Serve: a call of a handle takes milliseconds.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from deployments.access.models_root import check_models_root
from deployments.config import DeploymentConfig
from deployments.config_models import ModelRef
from deployments.processes import end_without_raylet
from deployments.telemetry.log_form import log_to_stderr

if TYPE_CHECKING:
    from deployments.remote_rows.remote_rows import Find, Found
    from deployments.remote_rows.row_server import RowServer

_FIND_S = 2.0  # within which a shard that there is says where


class RowShard:
    """Serves the rows of one model's bundle, of which others ask it for its share."""

    _server: "RowServer | None" = None

    def __init__(self, config: DeploymentConfig, ref: ModelRef) -> None:
        from deployments.remote_rows.row_server import RowServer
        from dpiframe_core.bundle.bundle import read_bundle

        check_models_root(config)
        log_to_stderr(config.log_level, config.log_format)
        end_without_raylet()
        bundle, own = read_bundle(ref.path), ray.get_runtime_context().get_node_id()
        self._host: str = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == own)
        self._fingerprint = bundle.fingerprint
        schema = bundle.manifest.feature_schema
        self._server = RowServer([bundle.tables[t.name] for t in schema.tables], self._host)

    def address(self) -> tuple[str, int, bytes, str]:
        """See `Found`."""
        if self._server is None:
            raise RuntimeError("row shard: got a call before it listens")
        return self._host, self._server.port, self._server.secret, self._fingerprint

    def check_health(self) -> None:
        """Asked by Serve, which replaces a shard that raises."""
        if self._server is not None:
            self._server.check()

    def __del__(self) -> None:
        if self._server is not None:
            self._server.close()


def row_shards(config: DeploymentConfig, alike: Mapping[str, Any]) -> dict[int, list[Any]]:
    """By the number of a model, its shards, each a deployment of its own: which rows it has goes with its name."""
    found: dict[int, list[Any]] = {}
    for i, ref in enumerate(config.models):
        remote = None if ref.tables is None else ref.tables.remote
        if remote is None:
            continue
        resources = {} if remote.resource is None else {"resources": {remote.resource: 0.001}}
        found[i] = [
            serve.deployment(
                RowShard,
                name=f"Rows-{i}-{shard}",
                num_replicas=remote.replicas,
                ray_actor_options={"num_cpus": remote.cpus_per_shard, "num_gpus": 0, **resources},
                graceful_shutdown_timeout_s=3 * config.drain_s,  # it outlasts those that it serves
                **alike,
            ).bind(config, ref)
            for shard in range(remote.shards)
        ]
    return found


def finders(shards: Mapping[int, Sequence[Any]] | None) -> "dict[int, list[Find]]":
    """Of handles, as a replica gets them. To be called on its event loop, where handles are at home by our flags of Serve."""
    loop = asyncio.get_running_loop()
    return {i: [_finder(handle, loop) for handle in handles] for i, handles in (shards or {}).items()}


def _finder(handle: Any, loop: asyncio.AbstractEventLoop) -> "Find":
    from deployments.remote_rows.remote_rows import Found  # with torch, which a launcher does not wait for

    async def asked() -> tuple[str, int, bytes, str]:
        said: tuple[str, int, bytes, str] = await asyncio.wait_for(handle.address.remote(), _FIND_S)
        return said

    def find() -> "Found":
        return Found(*asyncio.run_coroutine_threadsafe(asked(), loop).result(2 * _FIND_S))

    return find
