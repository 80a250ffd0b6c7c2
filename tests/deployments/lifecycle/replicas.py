"""A service without Ray, HTTP or engines: a coordinator, and replicas that only note what they hold and where requests go."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments.lifecycle import coordinator as coordinator_module
from deployments.lifecycle import follower as follower_module
from deployments.lifecycle.coordinator import Coordinator
from deployments.lifecycle.desired import Desired
from deployments.lifecycle.follower import Follower
from deployments.lifecycle.members import Member, Report, Wish
from deployments.lifecycle.release import Key, Release
from deployments.lifecycle.state_file import StateFile
from dpiframe_core.errors import BundleError


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Waits of seconds become such of milliseconds."""
    patch.setattr(coordinator_module, "_POLL_S", 0.02)
    patch.setattr(follower_module, "_RETRY_S", 0.01)


class Service:
    """Its coordinator may be replaced by one that knows nothing, as when its process ends."""

    def __init__(self, desired: Desired, topology: str = "colocated", file: str | None = None) -> None:
        self.desired, self.topology, self.file = desired, topology, StateFile(file)
        self.coordinator = Coordinator(self.file)
        self.replicas: list[FakeReplica] = []
        self.bad: set[str] = set()  # versions that no replica can load
        self.starts = 0

    def having(self, part: str) -> "list[FakeReplica]":
        return [replica for replica in self.replicas if getattr(replica.member, part)]

    async def start(self, part: str = "", digest: str = "d", desired: Desired | None = None) -> "FakeReplica":
        """One more replica. `part`, in the fan-in: "scores" or "answers"."""
        both = self.topology == "colocated"
        self.starts += 1
        member = Member(f"r{self.starts}", "n", both or part == "scores", both or part == "answers", digest)
        replica = FakeReplica(self, member, desired or self.desired)
        self.replicas.append(replica)
        try:
            await replica.follower.start()
        except BaseException:
            await replica.kill()
            raise
        return replica

    def restart_coordinator(self) -> None:
        if self.coordinator._ticker is not None:
            self.coordinator._ticker.cancel()
        self.coordinator = Coordinator(self.file, settle_s=0.05)

    async def close(self) -> None:
        for replica in list(self.replicas):
            await replica.kill()
        self.restart_coordinator()


class FakeReplica:
    """A `Host` and its `Link`. Asserts what engines and ingresses owe each other."""

    def __init__(self, service: Service, member: Member, desired: Desired) -> None:
        self.service, self.member = service, member
        self.loaded: dict[Key, Release] = {}
        self.routed: Desired | None = None
        self.hold: asyncio.Event | None = None  # loads wait for it
        self.follower = Follower(self, desired, member, self)

    async def kill(self) -> None:
        """As kill -9: nobody is told."""
        self.service.replicas.remove(self)
        for task in self.follower._tasks:
            task.cancel()
        await asyncio.gather(*self.follower._tasks, return_exceptions=True)

    # Host

    async def load(self, release: Release) -> None:
        await asyncio.sleep(0)
        if self.hold is not None:
            await self.hold.wait()
        if release.version in self.service.bad:
            raise BundleError(f"{release.path}: golden rows: got scores off by 0.1")
        assert release.key not in self.loaded
        if not self.member.scores:
            for engine in self.service.having("scores"):
                assert engine.routed is None or release.key in engine.loaded, "an engine of this service lacks it"
        self.loaded[release.key] = release

    def route(self, desired: Desired) -> None:
        assert desired.releases.items() <= self.loaded.items()
        self.routed = desired

    async def unload(self, key: Key) -> None:
        assert self.routed is not None
        assert key not in self.routed.releases
        if not self.member.answers:
            assert not any(key in ingress.loaded for ingress in self.service.having("answers")), "an ingress may still need it"
        del self.loaded[key]

    # Link

    async def follow(self, member: Member, report: Report) -> Wish:
        return await self._reached(lambda coordinator: coordinator.follow(member, report))  # type: ignore[no-any-return]

    async def hear(self, member: Member, report: Report) -> None:
        await self._reached(lambda coordinator: coordinator.hear(member, report))

    async def leave(self, member_id: str) -> None:
        await self._reached(lambda coordinator: coordinator.leave(member_id))

    async def _reached(self, ask: Callable[[Coordinator], Any]) -> Any:
        coordinator = self.service.coordinator
        answer = await ask(coordinator)
        if coordinator is not self.service.coordinator:
            raise ConnectionError("the coordinator has ended")
        return answer
