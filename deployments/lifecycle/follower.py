"""A replica's end of the agreement: carries out what the coordinator wishes, and says how far it is. Knows no Ray.

While the coordinator cannot be reached, the replica goes on as it is.
"""

import asyncio
import contextlib
import logging
from typing import Protocol

from deployments.lifecycle.desired import Desired
from deployments.lifecycle.members import Member, Report, Wish
from deployments.lifecycle.release import Key, Release
from dpiframe_core.errors import DPIFrameError, Unavailable

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class Host(Protocol):
    """A replica, as far as it loads and hands out requests."""

    async def load(self, release: Release) -> None:
        """Raises DPIFrameError if it does not serve; nothing is left of it then."""

    async def unload(self, key: Key) -> None:
        """Once its last request is answered. No request goes there any more."""

    def route(self, desired: Desired) -> None:
        """All that `desired` names is loaded."""


class Link(Protocol):
    """The coordinator, wherever it is. Any call may raise anything while it cannot be reached."""

    async def follow(self, member: Member, report: Report) -> Wish: ...
    async def hear(self, member: Member, report: Report) -> None: ...
    async def leave(self, member_id: str) -> None: ...


class Follower:
    """Of one replica, on its event loop. `desired`: what its configuration says. Without a link, that is all that it serves."""

    def __init__(self, host: Host, desired: Desired, member: Member, link: Link | None = None) -> None:
        self.desired = desired
        self._host, self._member, self._link = host, member, link
        self._wish: Wish | None = None
        self._seen = "", -1
        self._applied = "", -1
        self._loaded: dict[Key, Release] = {}
        self._failed: dict[Key, str] = {}
        self._came = asyncio.Event()
        self._fault: DPIFrameError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns once the replica serves what is to be served now, and goes on following.

        Raises:
            DPIFrameError: it cannot load what the others serve, or the coordinator does not know what that is.
        """
        if self._link is None:
            await self._apply(Wish("", 0, tuple(self.desired.releases.values()), self.desired), first=True)
            return
        self._tasks.append(asyncio.create_task(self._poll(self._link), name="lifecycle-poll"))
        try:
            await self._catch_up()
        except BaseException:
            await self.stop()  # else others would wait for it
            raise
        await self._tell()
        self._tasks.append(asyncio.create_task(self._carry_out(), name="lifecycle"))

    def check(self) -> None:
        """Raises DPIFrameError if this replica cannot serve what the others do: another one in its place may."""
        if self._fault is not None:
            raise self._fault

    async def stop(self) -> None:
        """Follows no longer."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._link is not None:
            with contextlib.suppress(Exception):  # it may be gone before its replicas
                await asyncio.wait_for(self._link.leave(self._member.id), _RETRY_S)

    async def _catch_up(self) -> None:
        """Returns once the newest wish is carried out."""
        applied: Wish | None = None
        while applied is None or self._wish is not applied:
            await self._came.wait()
            self._came.clear()
            self.check()
            applied = self._wish
            assert applied is not None
            await self._apply(applied, first=True)

    async def _poll(self, link: Link) -> None:
        while True:
            try:
                wish = await link.follow(self._member, self._report())
            except Exception as error:
                if isinstance(error, DPIFrameError) and not self._seen[0]:  # it does not know what is to be served
                    self._fault = error
                    self._came.set()
                    return
                log.warning("the coordinator of models cannot be reached: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if (wish.epoch, wish.serial) != self._seen:
                self._seen = wish.epoch, wish.serial
                if wish.desired is not None:
                    self._wish = wish
                    self._came.set()

    async def _carry_out(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            assert self._wish is not None
            try:
                await self._apply(self._wish)
            except Exception:
                log.exception("carrying out a change of models failed")
                # Nobody waits for it any more once Serve has replaced it.
                self._fault = Unavailable("models: got an error while a change was carried out, expected none; the log has it")
                continue
            await self._tell()

    async def _apply(self, wish: Wish, *, first: bool = False) -> None:
        desired = wish.desired or self.desired
        wanted = {release.key: release for release in wish.releases}
        self._failed = {key: why for key, why in self._failed.items() if key in wanted}
        for key, release in wanted.items():
            if self._loaded.get(key) == release or key in self._failed:
                continue
            try:
                if key in self._loaded:  # it was unloaded and put again while this replica did not hear of it
                    raise Unavailable(f"{release.path}: got it in the place of a version {release.version} loaded before")
                await self._host.load(release)
            except DPIFrameError as error:
                if first and key in desired.releases:
                    raise
                self._failed[key] = str(error)
            except Exception as error:
                if first and key in desired.releases:
                    raise
                log.exception("loading version %s of %s failed", release.version, release.model)
                self._failed[key] = f"{type(error).__name__}: {error}"
            else:
                self._loaded[key] = release
        if not self._failed.keys() & desired.releases.keys():
            self._host.route(desired)
            self.desired = desired
            for key in [key for key in self._loaded if key not in wanted]:
                del self._loaded[key]
                await self._host.unload(key)
        lacking = [why for key, why in self._failed.items() if key in desired.releases]
        self._fault = Unavailable(f"models: {lacking[0]}") if lacking else None
        self._applied = wish.epoch, wish.serial

    async def _tell(self) -> None:
        if self._link is not None:
            with contextlib.suppress(Exception):  # then the next poll tells
                await self._link.hear(self._member, self._report())

    def _report(self) -> Report:
        epoch, seen = self._seen
        return Report(
            epoch=epoch,
            seen=seen,
            applied=self._applied[1] if self._applied[0] == epoch else -1,
            desired=self.desired,
            wished=None if self._wish is None else self._wish.desired,
            loaded=tuple(self._loaded),
            failed=dict(self._failed),
        )
