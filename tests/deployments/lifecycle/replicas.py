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
        self.out_of_reach: set[str] = set()  # replicas that do not reach the coordinator
        self.faults: list[str] = []  # what no replica may ever see; a follower logs what its host raises
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
            assert member.id not in self.coordinator._seats
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
        assert self.faults == []


class FakeReplica:
    """A `Host` and its `Link`. Notes where engines and ingresses fail each other."""

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
        self._never(release.key in self.loaded, "it is loaded twice")
        if not self.member.scores:
            for engine in self.service.having("scores"):
                lacking = engine.routed is not None and release.key not in engine.loaded
                self._never(lacking, "an ingress looks for it before the engines have it")
        self.loaded[release.key] = release

    def route(self, desired: Desired) -> None:
        self._never(not desired.releases.items() <= self.loaded.items(), "requests go where nothing is")
        self.routed = desired

    async def unload(self, key: Key) -> None:
        self._never(self.routed is None or key in self.routed.releases, "what goes still gets requests")
        if not self.member.answers:
            needed = any(key in ingress.loaded for ingress in self.service.having("answers"))
            self._never(needed, "an ingress may still need it")
        del self.loaded[key]

    def _never(self, fault: bool, why: str) -> None:
        if fault:
            self.service.faults.append(why)

    # Link

    async def follow(self, member: Member, report: Report) -> Wish:
        return await self._reached(lambda coordinator: coordinator.follow(member, report))  # type: ignore[no-any-return]

    async def hear(self, member: Member, report: Report) -> None:
        await self._reached(lambda coordinator: coordinator.hear(member, report))

    async def leave(self, member_id: str) -> None:
        await self._reached(lambda coordinator: coordinator.leave(member_id))

    async def _reached(self, ask: Callable[[Coordinator], Any]) -> Any:
        coordinator = self.service.coordinator
        if self.member.id in self.service.out_of_reach:
            raise ConnectionError("the coordinator is out of reach")
        answer = await ask(coordinator)
        if coordinator is not self.service.coordinator:
            raise ConnectionError("the coordinator has ended")
        return answer
