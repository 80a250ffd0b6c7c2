"""The coordinator as a named Ray actor, one for an application, and how replicas reach it. Here alone the lifecycle knows Ray.

The actor is detached, and lies on the node of the replica that made it: there are bundles and the file that remembers, which
the node of Ray's head may lack. When it ends, the replica that notices first makes another one on its own node, and all tell
it what they serve. So Ray does not restart it: that could be anywhere. It ends when it has had no replica for a minute.
"""

import asyncio
import hashlib
import inspect
import json
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.access.models_root import check_models_root
from deployments.config import DeploymentConfig, parse_config
from deployments.lifecycle.control import Control, FixedModels
from deployments.lifecycle.coordinator import Coordinator
from deployments.lifecycle.desired import desired_of
from deployments.lifecycle.follower import Follower, Host
from deployments.lifecycle.members import Member, Report, Wish
from deployments.lifecycle.state_file import StateFile
from deployments.processes import end_without_raylet
from dpiframe_core.errors import DPIFrameError, Unavailable

log = logging.getLogger(__name__)

_NAMESPACE = "serve"
_CALLS = 1000  # at once: each replica has one open at all times
_LOOK_S = 10.0
_SETTLE_S = 3.0
_LOAD_S = 600.0


class CoordinatorActor:
    """What Ray makes an actor of."""

    def __init__(self, state_file: str | None, settle_s: float) -> None:
        self._coordinator = Coordinator(StateFile(state_file), settle_s)
        end_without_raylet()
        self._end: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        if self._end is None:
            self._end = asyncio.create_task(self._end_when_abandoned())
        answer = getattr(self._coordinator, method)(*args, **named)
        return await answer if inspect.isawaitable(answer) else answer

    async def _end_when_abandoned(self) -> None:
        while not self._coordinator.abandoned:
            await asyncio.sleep(_LOOK_S)
        ray.actor.exit_actor()


class RayLink:
    """A `Link` and a `Control`. `node`: that of a replica, where its call makes the actor if there is none; others find it."""

    def __init__(self, application: str, state_file: str | None = None, node: str | None = None) -> None:
        self._name, self._state_file, self._node = f"dpiframe-models-{application}", state_file, node
        self._actor: ActorHandle[Any] | None = None
        self._met_one = False

    async def follow(self, member: Member, report: Report) -> Wish:
        return await self._call("follow", member, report)  # type: ignore[no-any-return]

    async def hear(self, member: Member, report: Report) -> None:
        await self._call("hear", member, report)

    async def leave(self, member_id: str) -> None:
        await self._call("leave", member_id)

    async def ask(self, method: str, *args: Any, **named: Any) -> dict[str, Any]:
        """One of the coordinator's methods for clients. Raises what it does; Unavailable if it cannot be reached."""
        try:
            return await self._call(method, *args, **named)  # type: ignore[no-any-return]
        except DPIFrameError:
            raise
        except Exception as error:
            raise Unavailable(f"coordinator of models: got {type(error).__name__}, expected an answer: ask again") from error

    async def _call(self, method: str, *args: Any, **named: Any) -> Any:
        actor: Any = self._actor or await asyncio.to_thread(self._find)
        self._actor = actor
        try:
            answer = await actor.call.remote(method, *args, **named)
            self._met_one = True
            return answer
        except RayTaskError as error:
            if isinstance(error.cause, DPIFrameError):
                self._met_one = True
                raise error.cause from None
            raise
        except Exception:
            self._actor = None  # the next call looks for it anew
            self._met_one = True  # others may have followed the one that has ended
            raise

    def _find(self) -> "ActorHandle[Any]":
        if self._node is None or not _runs(self._node):  # Ray starts nothing on a node that it has given up
            return ray.get_actor(self._name, _NAMESPACE)
        options = {"namespace": _NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
        here = NodeAffinitySchedulingStrategy(self._node, soft=False)
        made = ray.remote(CoordinatorActor).options(
            name=self._name, num_cpus=0, max_concurrency=_CALLS, scheduling_strategy=here, **options
        )
        # Who has followed one before makes its successor: there are others, and they may know of later changes.
        handle: ActorHandle[Any] = made.remote(self._state_file, _SETTLE_S if self._met_one else 0.0)
        return handle


def _runs(node: str) -> bool:
    return any(other["Alive"] for other in ray.nodes() if other["NodeID"] == node)


async def serve_configured(control: Control, config: DeploymentConfig, *, again: bool = False) -> None:
    """Has all replicas serve the models of a configuration that has changed in nothing else; `again`: even if it has not
    changed, but what is served has.

    Raises:
        BundleError, ConfigError: see `desired_of` and `check_models_root`. DPIFrameError: see `Coordinator.become`.
    """
    check_models_root(config)
    desired = await asyncio.to_thread(desired_of, config.models)
    await control.ask("become", desired, timeout_s=_LOAD_S, again=again)


async def reconfigure(control: Control | None, config: DeploymentConfig, said: Mapping[str, Any]) -> None:
    """The same for Serve's `user_config`, `{models: [...]}`. Faults are logged: Serve stops a replica that raises."""
    try:
        if control is not None:
            given = config.model_dump(mode="json", exclude_unset=True) | dict(said)
            await serve_configured(control, parse_config(given, "user_config").with_absolute_paths())
    except DPIFrameError as error:
        log.error("user_config: the models stay as they are: %s", error)


async def follower_of(host: Host, config: DeploymentConfig, *, scores: bool, answers: bool) -> tuple[Follower, Control]:
    """That of the replica whose process this is, and whom its clients ask for changes.

    Raises:
        BundleError, ConfigError: see `desired_of` and `check_models_root`.
    """
    check_models_root(config)
    desired = await asyncio.to_thread(desired_of, config.models)
    context = ray.get_runtime_context()
    said = json.dumps([config.models_root, *(ref.model_dump(mode="json") for ref in config.models)])
    digest = hashlib.sha256(said.encode()).hexdigest()
    member = Member(context.get_actor_id() or "", context.get_node_id(), scores, answers, digest)
    if config.models_root is None:
        alone = Follower(host, desired, member)
        return alone, FixedModels(lambda: alone.desired)
    link = RayLink(config.application, config.models_state, member.node)
    return Follower(host, desired, member, link), link
