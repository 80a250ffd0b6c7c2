"""Has all replicas of a service serve the same: one change at a time, in two phases. Knows no Ray: replicas call it.

A version is loaded by all who score, then by all who answer; when each has said that it is ready, all are told to switch. If
one fails, all forget the version. A replica that is not heard of for a while counts for nothing until it calls again; what it
then learns is what is served now. A coordinator that starts anew learns from the replicas' reports what that is.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from deployments.lifecycle.desired import CanaryOf, Desired, ModelState
from deployments.lifecycle.members import Member, Report, Wish
from deployments.lifecycle.refusals import Conflict, LoadFailed, LoadTimeout
from deployments.lifecycle.release import Release
from deployments.lifecycle.state_file import Remembered, StateFile
from dpiframe_core.errors import Unavailable

log = logging.getLogger(__name__)

_POLL_S = 1.0  # a member with no news for it is answered after so long, and calls again
_MOST_MISSED = 10  # polls: a member that misses more is taken to be dead
_UNDO_S = 30.0


@dataclass(slots=True)
class _Seat:
    member: Member
    report: Report
    missed: int = 0


class Coordinator:
    """Of one application, on one event loop.

    Args:
        file: remembers each change.
        settle_s: how long those who have followed another one before have to call, until any member is told what is served,
            and anything is changed.
    """

    def __init__(self, file: StateFile, settle_s: float = 0.0) -> None:
        self._file = file
        self._settled_at = time.monotonic() + settle_s
        self._epoch, self._serial = secrets.token_hex(4), 0
        self._digest = ""
        self._by_starting = False  # what has that digest is known from a member that has just started
        self._desired: Desired | None = None
        self._also: dict[str, tuple[Release, ...]] = {"scores": (), "answers": ()}  # beside those that are desired
        self._seats: dict[str, _Seat] = {}
        self._changing = asyncio.Lock()
        self._news = asyncio.Condition()
        self._ticker: asyncio.Task[None] | None = None

    # What members call.

    async def follow(self, member: Member, report: Report) -> Wish:
        """The newest wish, as soon as it is another one than the member has seen; or the same, in a second."""
        await self.hear(member, report)
        await self._settled()
        known = report.seen if report.epoch == self._epoch else -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S), self._news:
                await self._news.wait_for(lambda: self._serial > known)
        assert self._desired is not None
        if member.digest != self._digest:  # of a configuration that is being replaced: it stays as it is until it is stopped
            return Wish(self._epoch, self._serial)
        wanted = self._desired.releases
        for part in ("scores", "answers"):
            if getattr(member, part):
                wanted |= {release.key: release for release in self._also[part]}
        return Wish(self._epoch, self._serial, tuple(wanted.values()), self._desired)

    async def hear(self, member: Member, report: Report) -> None:
        """Takes note of how far a member is.

        Raises:
            ConfigError: the file that remembers is damaged.
        """
        self._ticker = self._ticker or asyncio.create_task(self._tick(), name="coordinator-tick")
        starting = not report.epoch and member.id not in self._seats
        reconfigured = starting and self._desired is not None and member.digest != self._digest
        async with self._changing if reconfigured else contextlib.nullcontext(), self._news:  # what is under way ends first
            self._learn(member.digest, report.decided, starting)
            newest = self._seats.get(member.id, _Seat(member, report)).report
            self._seats[member.id] = _Seat(member, max(report, newest, key=self._applied))  # Ray keeps no order of calls
            self._news.notify_all()

    async def leave(self, member_id: str) -> None:
        """The member stops."""
        async with self._news:
            self._seats.pop(member_id, None)
            self._news.notify_all()

    def _learn(self, digest: str, desired: Desired, starting: bool) -> None:
        if self._desired is None:
            remembered = self._file.read()
            if remembered is not None and remembered.digest == digest and remembered.desired.revision >= desired.revision:
                desired = remembered.desired
            self._digest, self._desired, self._by_starting = digest, desired, starting
        elif desired.revision > self._desired.revision and not self._changing.locked():  # it served before this began
            if digest != self._digest and self._by_starting:  # but is of a configuration that is being replaced
                digest, desired = self._digest, self._desired.model_copy(update={"revision": desired.revision + 1})
            self._digest, self._desired = digest, desired
        elif starting and digest != self._digest:  # the configuration has been changed, and its replicas come one by one
            log.warning("models: the configuration names others than before: those are served now")
            self._digest, self._by_starting = digest, True
            self._desired = desired.model_copy(update={"revision": self._desired.revision + 1})
        else:
            return
        self._serial += 1

    # What clients ask for.

    async def put(self, release: Release, *, live: bool, timeout_s: float) -> dict[str, Any]:
        """Loads a version everywhere, then has it answer if it is to be `live`. Asked for again, it finds nothing to do.

        Raises:
            Conflict: another change is under way, or the version is another bundle's.
            LoadFailed, LoadTimeout: a replica failed, or was not ready in time; everything is as before.
        """
        async with self._change() as desired:
            new = desired.with_release(release, live=live)
            await self._load(desired, new, timeout_s)
            await self._settle(desired, new)
        return self.state()

    async def become(self, configured: Desired, *, timeout_s: float, again: bool = False) -> dict[str, Any]:
        """Serves what a changed configuration says, all of its models at once. A replica that starts says its own again: what
        clients have changed since stays, unless it is to be as configured `again`.

        Raises:
            Conflict, LoadFailed, LoadTimeout: as `put`; but it waits for a change that is under way.
        """
        async with self._change(wait=True) as desired:
            if configured.configured != desired.configured or (again and not desired.serves(configured)):
                new = desired.reconfigured(configured)
                await self._load(desired, new, timeout_s)
                await self._settle(desired, new)
        return self.state()

    async def drop(self, model: str, version: str | None) -> dict[str, Any]:
        """Unloads a version, or all of a model, once its last request is answered.

        Raises:
            ModelNotFound, Conflict: see `ModelState.without` and `Desired.changed`.
        """
        return await self._alter(model, lambda state: None if version is None else state.without(version))

    async def roll_back(self, model: str) -> dict[str, Any]:
        """Raises as `ModelState.rolled_back`."""
        return await self._alter(model, ModelState.rolled_back)

    async def share(self, model: str, canary: CanaryOf | None) -> dict[str, Any]:
        """Raises as `ModelState.with_canary`."""
        return await self._alter(model, lambda state: state.with_canary(canary))

    async def shadow(self, model: str, version: str | None) -> dict[str, Any]:
        """Raises as `ModelState.with_shadow`."""
        return await self._alter(model, lambda state: state.with_shadow(version))

    def state(self) -> dict[str, Any]:
        """What is served, and how far each replica is with it."""
        if self._desired is None:
            raise Unavailable("models: got no replica yet, expected one")
        replicas = [
            {
                "id": seat.member.id,
                "node": seat.member.node,
                "current": (seat.report.desired.revision, seat.member.digest) == (self._desired.revision, self._digest),
                "loaded": ["/".join(key) for key in sorted(seat.report.loaded)],
                "failed": {"/".join(key): why for key, why in seat.report.failed.items()},
            }
            for seat in self._seats.values()
        ]
        return self._desired.model_dump(mode="json") | {"replicas": replicas}

    @property
    def abandoned(self) -> bool:
        """No member has been heard of for so long that none will be."""
        return time.monotonic() > self._settled_at + 60 and not self._seats

    async def _alter(self, model: str, change: Callable[[ModelState], ModelState | None]) -> dict[str, Any]:
        async with self._change() as desired:
            was = desired.model(model)
            state = change(was)
            if state != was:
                await self._settle(desired, desired.changed(model, state))
        return self.state()

    @contextlib.asynccontextmanager
    async def _change(self, *, wait: bool = False) -> AsyncIterator[Desired]:
        await self._settled()
        if self._changing.locked() and not wait:
            raise Conflict("models: got a change while another one is under way, expected one at a time")
        async with self._changing:
            seats = self._seats.values()
            parts = any(seat.member.scores for seat in seats) and any(seat.member.answers for seat in seats)
            if self._desired is None or not parts:
                raise Unavailable("replicas: got none, or none of the engines, expected some to make a change")
            if any(seat.member.digest != self._digest for seat in seats):
                rule = "all of them to have one configuration: wait until the rollout is over"
                raise Conflict(f"replicas: got some with another configuration, expected {rule}")
            yield self._desired

    async def _settled(self) -> None:
        await asyncio.sleep(max(0.0, self._settled_at - time.monotonic()))

    async def _load(self, old: Desired, new: Desired, timeout_s: float) -> None:
        """Phase one: every engine first, for an ingress looks for those that have a version."""
        missing = tuple(release for key, release in new.releases.items() if key not in old.releases)
        if not missing:
            return
        try:
            async with asyncio.timeout(timeout_s):
                for part in ("scores", "answers"):
                    self._also[part] = missing
                    await self._carried_out(part, missing)
        except BaseException as error:
            await self._undo()
            if isinstance(error, TimeoutError):
                rule = "all of them within timeout_s"
                raise LoadTimeout(f"replicas: got some not ready after {timeout_s:g} s, expected {rule}") from None
            raise

    async def _undo(self) -> None:
        for part in ("answers", "scores"):  # an engine holds what an ingress may still ask it for
            self._also[part] = ()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_UNDO_S):
                    await self._carried_out(part)

    async def _settle(self, old: Desired, new: Desired) -> None:
        """Phase two: all switch. Engines keep what goes until no ingress needs it."""
        try:
            await asyncio.to_thread(self._file.write, Remembered(digest=self._digest, desired=new))
        except OSError as error:
            await self._undo()
            raise Unavailable(f"models_state: got {error.strerror!r}, expected to write it; nothing has changed") from None
        self._desired = new
        gone = tuple(release for key, release in old.releases.items() if key not in new.releases)
        self._also = {"scores": gone, "answers": ()}
        await self._carried_out("answers")
        self._also["scores"] = ()
        await self._carried_out("scores", anew=bool(gone))

    async def _carried_out(self, part: str, needed: tuple[Release, ...] = (), *, anew: bool = True) -> None:
        """Has all members do what they are to do now, unless they know it; returns once each of that part has, or is silent.

        Raises:
            LoadFailed: one could not load what is needed.
        """
        async with self._news:
            self._serial += anew
            serial = self._serial
            self._news.notify_all()
            while True:
                seats = [seat for seat in self._seats.values() if getattr(seat.member, part)]
                for seat in seats:
                    lacking = [release.key for release in needed if release.key in seat.report.failed]
                    if lacking and self._applied(seat.report) >= serial:
                        why = seat.report.failed[lacking[0]]
                        raise LoadFailed(f"{why} (replica {seat.member.id} on {seat.member.node})")
                if all(self._applied(seat.report) >= serial for seat in seats):
                    return
                await self._news.wait()

    def _applied(self, report: Report) -> int:
        """The last of this coordinator's wishes that its member has carried out."""
        return report.applied if report.epoch == self._epoch else -1

    async def _tick(self) -> None:
        """Forgets who is silent. Counted in turns of this loop: while it stands still, it hears nobody, and misses nobody."""
        while True:
            await asyncio.sleep(_POLL_S)
            for seat in list(self._seats.values()):
                seat.missed += 1
                if seat.missed > _MOST_MISSED:
                    log.warning("replica %s has not been heard of for %d polls", seat.member.id, _MOST_MISSED)
                    del self._seats[seat.member.id]
            async with self._news:
                self._news.notify_all()
