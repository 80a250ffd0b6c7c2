"""All replicas of a service serve the same, whatever comes, goes or fails: a coordinator and followers in one process."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.lifecycle.desired import CanaryOf, Desired
from deployments.lifecycle.refusals import Conflict, LoadFailed, LoadTimeout
from dpiframe_core.errors import BundleError, ConfigError, DPIFrameError, Unavailable
from tests.deployments.lifecycle.replicas import FakeReplica, Service, hurry
from tests.deployments.lifecycle.test_desired import one, release
from tests.deployments.serving_doubles import until

FANIN = ("scores", "scores", "answers", "answers")


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await body

    asyncio.run(bounded())


def live(service: Service) -> list[str]:
    """The version that each replica answers with."""
    return [replica.routed.model("m").live for replica in service.having("answers") if replica.routed is not None]


def put(service: Service, version: str, **how: Any) -> Coroutine[Any, Any, dict[str, Any]]:
    return service.coordinator.put(release(version), **{"live": True, "timeout_s": 10} | how)


async def started(topology: str, **how: Any) -> Service:
    service = Service(one("1"), topology, **how)
    await asyncio.gather(*(service.start(part) for part in (FANIN if topology == "fanin" else ("", ""))))
    return service


@pytest.mark.parametrize("topology", ["colocated", "fanin"])
def test_a_version_goes_live_at_all_replicas_or_at_none(topology: str) -> None:
    async def body() -> None:
        service = await started(topology)
        state = await put(service, "2")
        assert live(service) == ["2", "2"]
        assert [replica["current"] for replica in state["replicas"]] == [True] * len(service.replicas)
        service.bad.add("3")
        with pytest.raises(LoadFailed, match=r"/models/3: golden rows: got scores off by 0\.1 \(replica r\d on n\)"):
            await put(service, "3")
        assert live(service) == ["2", "2"]
        assert all(set(replica.loaded) == {("m", "1"), ("m", "2")} for replica in service.replicas)
        await service.coordinator.roll_back("m")
        assert live(service) == ["1", "1"]
        await service.coordinator.drop("m", "2")
        assert all(set(replica.loaded) == {("m", "1")} for replica in service.replicas)
        await service.close()

    run(body())


@pytest.mark.parametrize("topology", ["colocated", "fanin"])
def test_a_version_that_one_replica_cannot_load_is_unloaded_by_those_that_can(topology: str) -> None:
    async def body() -> None:
        service = await started(topology)
        first = service.having("answers")[0]

        async def broken(release: Any) -> None:
            raise MemoryError("the device is full")

        first.load = broken  # type: ignore[method-assign]
        with pytest.raises(LoadFailed, match=r"MemoryError: the device is full \(replica r\d on n\)"):
            await put(service, "2")
        assert all(set(replica.loaded) == {("m", "1")} for replica in service.replicas)
        first.follower.check()  # it serves as before, and is well
        await service.close()

    run(body())


def test_nobody_switches_before_everybody_is_ready_and_one_change_is_made_at_a_time() -> None:
    async def body() -> None:
        service = await started("colocated")
        slow = service.replicas[1]
        slow.hold = asyncio.Event()
        putting = asyncio.create_task(put(service, "2"))
        await until(lambda: ("m", "2") in service.replicas[0].loaded)
        with pytest.raises(Conflict, match="models: got a change while another one is under way, expected one at a time"):
            await service.coordinator.roll_back("m")
        await asyncio.sleep(0.05)
        assert (live(service), putting.done()) == (["1", "1"], False)
        slow.hold.set()
        await putting
        assert live(service) == ["2", "2"]
        await service.close()

    run(body())


def test_a_replica_that_is_not_ready_in_time_has_the_others_forget_the_version() -> None:
    async def body() -> None:
        service = await started("colocated")
        slow = service.replicas[1]
        slow.hold = asyncio.Event()
        undo = service.coordinator._undo

        async def undone() -> None:
            slow.hold.set()
            await undo()

        service.coordinator._undo = undone  # type: ignore[method-assign]
        with pytest.raises(LoadTimeout, match=r"replicas: got some not ready after 0\.1 s, expected all of them within"):
            await put(service, "2", timeout_s=0.1)
        assert live(service) == ["1", "1"]
        assert [set(replica.loaded) for replica in service.replicas] == [{("m", "1")}] * 2
        await service.close()

    run(body())


def test_a_replica_that_dies_in_the_middle_holds_nothing_up() -> None:
    async def body() -> None:
        service = await started("colocated")
        dying = service.replicas[1]
        dying.hold = asyncio.Event()
        putting = asyncio.create_task(put(service, "2"))
        await until(lambda: ("m", "2") in service.replicas[0].loaded)
        await dying.kill()
        await putting
        assert live(service) == ["2"]
        await service.close()

    run(body())


def test_a_replica_that_starts_later_serves_what_is_current_and_one_that_starts_in_the_middle_is_waited_for() -> None:
    async def body() -> None:
        service = await started("colocated")
        await put(service, "2")
        late = await service.start()
        assert live(service) == ["2"] * 3
        late.hold = asyncio.Event()
        putting = asyncio.create_task(put(service, "3"))
        await asyncio.sleep(0.05)
        starting = asyncio.create_task(service.start())
        await asyncio.sleep(0.05)
        late.hold.set()
        await asyncio.gather(putting, starting)
        assert live(service) == ["3"] * 4
        await service.close()

    run(body())


def test_a_replica_that_cannot_load_what_the_others_serve_does_not_start() -> None:
    async def body() -> None:
        service = await started("colocated")
        service.bad.add("1")
        with pytest.raises(BundleError, match="golden rows"):
            await service.start()
        await service.close()

    run(body())


def test_a_replica_that_fails_at_what_it_has_to_do_is_unwell_and_is_waited_for_until_it_is_replaced() -> None:
    async def body() -> None:
        service = await started("colocated")
        broken = service.replicas[0]

        def fails(desired: Desired) -> None:
            raise KeyError("m")

        broken.route = fails  # type: ignore[method-assign]
        putting = asyncio.create_task(put(service, "2"))
        await until(lambda: broken.follower._fault is not None)
        assert live(service) == ["1", "1"]
        with pytest.raises(Unavailable, match="models: got an error while a change was carried out"):
            broken.follower.check()
        assert not putting.done()
        await broken.kill()
        await putting
        await service.start()
        assert live(service) == ["2", "2"]
        await service.close()

    run(body())


def test_a_coordinator_that_starts_anew_learns_what_is_served_from_its_replicas() -> None:
    async def body() -> None:
        service = await started("colocated")
        await put(service, "2")
        service.restart_coordinator()
        # All who followed the last one call in time, however slow this host is.
        service.coordinator._settled = lambda: until(lambda: len(service.coordinator._seats) >= 2)  # type: ignore[method-assign]
        late = await service.start()  # it may be the first that the new one hears of, and knows only its configuration
        await put(service, "3", live=False)
        assert live(service) == ["2"] * 3
        await service.coordinator.roll_back("m")
        assert live(service) == ["1"] * 3
        assert late.routed == service.replicas[0].routed
        await service.close()

    run(body())


def test_what_was_changed_is_not_lost_if_a_new_replica_reaches_a_new_coordinator_first() -> None:
    async def body() -> None:
        service = await started("colocated")
        await put(service, "2")
        service.out_of_reach = {replica.member.id for replica in service.replicas}
        service.restart_coordinator()
        await service.start()
        assert live(service) == ["2", "2", "1"]  # it knows no better, and nor does anybody that it can ask
        service.out_of_reach.clear()
        await until(lambda: live(service) == ["2"] * 3)
        await service.close()

    run(body())


def test_what_was_decided_is_not_lost_if_who_has_carried_it_out_and_the_coordinator_end_together() -> None:
    """As with a node of two, while a replica on another node loads what it was told to."""

    async def body() -> None:
        service = await started("colocated")
        await put(service, "2")
        first = list(service.replicas)
        starting = asyncio.create_task(service.start())
        await asyncio.sleep(0)
        late = service.replicas[2]
        late.hold = asyncio.Event()
        await until(lambda: late.follower._wish is not None)
        for replica in first:
            await replica.kill()
        service.restart_coordinator()
        await until(lambda: late.follower._seen[0] == service.coordinator._epoch)
        late.hold.set()
        assert (await starting).routed.model("m").live == "2"
        assert live(service) == ["2"]
        await service.close()

    run(body())


def test_who_has_not_heard_of_a_change_is_told_nothing_by_a_new_coordinator_before_those_who_have_can_tell_it() -> None:
    async def body() -> None:
        service = await started("fanin")
        await put(service, "2", live=False)
        behind, *ahead = service.replicas
        routed: list[int] = []
        behind.route = lambda desired: routed.append(desired.revision)  # type: ignore[method-assign]
        service.out_of_reach = {behind.member.id}
        await asyncio.sleep(0.05)  # what it had asked is answered
        changing = asyncio.create_task(service.coordinator.share("m", CanaryOf(version="2", percent=50.0)))
        await until(lambda: all(replica.routed is not None and replica.routed.revision == 2 for replica in ahead))
        changing.cancel()
        service.out_of_reach = {replica.member.id for replica in ahead}
        service.restart_coordinator()
        await until(lambda: behind.member.id in service.coordinator._seats)
        await asyncio.sleep(0.01)
        service.out_of_reach = set()
        await until(lambda: routed[-1:] == [2])
        assert routed == [2]
        await service.close()

    run(body())


def test_a_service_that_starts_anew_serves_what_its_file_remembers_unless_its_configuration_has_changed(tmp_path: Path) -> None:
    async def body() -> None:
        path = str(tmp_path / "state.json")
        service = await started("colocated", file=path)
        await put(service, "2")
        await service.close()
        again = Service(one("1"), file=path)
        await again.start()
        assert live(again) == ["2"]
        await again.close()
        other = Service(one("7"), file=path)
        await other.start(digest="another configuration")
        assert live(other) == ["7"]
        await other.close()
        (tmp_path / "state.json").write_text("{")
        with pytest.raises(ConfigError, match=r"state\.json: "):
            await Service(one("1"), file=path).start()

    run(body())


def test_a_change_that_cannot_be_remembered_is_not_made(tmp_path: Path) -> None:
    async def body() -> None:
        service = await started("colocated", file=str(tmp_path / "nowhere" / "state.json"))
        with pytest.raises(Unavailable, match="models_state: got 'No such file or directory', expected to write it"):
            await put(service, "2")
        assert live(service) == ["1", "1"]
        assert [set(replica.loaded) for replica in service.replicas] == [{("m", "1")}] * 2
        await service.close()

    run(body())


def test_while_a_configuration_is_rolled_out_its_old_replicas_stay_as_they_are_and_nothing_else_is_changed() -> None:
    async def body() -> None:
        service = await started("colocated")
        await put(service, "2")
        new = await service.start(digest="other models", desired=one("9"))
        await asyncio.sleep(0.1)
        assert live(service) == ["2", "2", "9"]
        with pytest.raises(Conflict, match="replicas: got some with another configuration, expected all of them to have one"):
            await put(service, "3")
        for old in service.replicas[:2]:
            await old.kill()
        await until(lambda: len(service.coordinator.state()["replicas"]) == 1)
        await put(service, "10")
        assert live(service) == ["10"]
        assert new.routed is not None
        await service.close()

    run(body())


def test_a_replica_of_a_new_configuration_may_reach_a_new_coordinator_before_those_that_it_replaces() -> None:
    async def body() -> None:
        service = await started("colocated")
        await put(service, "2")
        old = list(service.replicas)
        service.out_of_reach = {replica.member.id for replica in old}
        service.restart_coordinator()
        await service.start(digest="other models", desired=one("9"))
        service.out_of_reach.clear()
        await until(lambda: len(service.coordinator._seats) == 3)
        assert live(service) == ["2", "2", "9"]
        for replica in old:
            await replica.kill()
        await until(lambda: len(service.coordinator.state()["replicas"]) == 1)
        await put(service, "10")
        assert live(service) == ["10"]
        await service.close()

    run(body())


@pytest.mark.parametrize("topology", ["colocated", "fanin"])
def test_a_report_that_is_overtaken_by_a_newer_one_takes_nothing_back(topology: str) -> None:
    async def body() -> None:
        service = await started(topology)
        before = [(replica.member, replica.follower._report()) for replica in service.replicas]
        changed = await put(service, "2")
        for member, report in before:
            await service.coordinator.hear(member, report)
        assert service.coordinator.state() == changed
        assert all(replica["current"] for replica in changed["replicas"])
        service.restart_coordinator()  # what another one was told says nothing of what this one has asked for
        await until(lambda: len(service.coordinator._seats) == len(service.replicas))
        await service.coordinator.roll_back("m")
        assert live(service) == ["1", "1"]
        await service.close()

    run(body())


def test_asked_for_again_a_version_is_there_already() -> None:
    async def body() -> None:
        service = await started("colocated")
        first = await put(service, "2")
        second = await put(service, "2")
        assert (first["revision"], second["revision"]) == (1, 1)
        await service.close()

    run(body())


def test_several_models_have_versions_of_their_own() -> None:
    async def body() -> None:
        service = await started("fanin")
        await service.coordinator.put(release("1", "other"), live=True, timeout_s=5)
        await put(service, "2")
        assert all(set(r.loaded) == {("m", "1"), ("m", "2"), ("other", "1")} for r in service.replicas)
        await service.coordinator.drop("m", None)
        assert all(set(r.loaded) == {("other", "1")} for r in service.replicas)
        await service.close()

    run(body())


def test_a_changed_configuration_is_followed_once_whatever_else_was_changed_since() -> None:
    def configured(said: str, *versions: str) -> Desired:
        return one(*versions).model_copy(update={"configured": said})

    async def body() -> None:
        service = await started("fanin")
        become = service.coordinator.become
        await asyncio.gather(*(become(configured("b", "2", "3"), timeout_s=10) for _ in range(3)))  # as replicas hear of it
        assert live(service) == ["2", "2"]
        assert all({version for _, version in replica.loaded} == {"1", "2", "3"} for replica in service.replicas)
        await service.coordinator.roll_back("m")
        await become(configured("b", "2", "3"), timeout_s=10)  # a replica that starts later hears of it again
        assert live(service) == ["1", "1"]
        await become(configured("b", "2", "3"), timeout_s=10, again=True)  # somebody wants it as configured
        assert live(service) == ["2", "2"]
        before = service.coordinator.state()["revision"]
        await become(configured("b", "2", "3"), timeout_s=10, again=True)  # and it is, with one to roll back to
        assert service.coordinator.state()["revision"] == before
        await service.coordinator.roll_back("m")
        assert live(service) == ["1", "1"]
        service.bad.add("4")
        with pytest.raises(LoadFailed):
            await become(configured("c", "4"), timeout_s=10)
        assert live(service) == ["1", "1"]
        other = one("1").changed("m", one("1").model("m").model_copy(update={"releases": (release("1", bundle="x"),)}))
        with pytest.raises(Conflict, match="version: got '1' of 'm' with another bundle than the one loaded"):
            await become(other.model_copy(update={"configured": "d"}), timeout_s=10)
        await become(configured("e", "1"), timeout_s=10)
        assert all(set(replica.loaded) == {("m", "1")} for replica in service.replicas)
        await service.close()

    run(body())


class AnyHistory(RuleBasedStateMachine):
    """Replicas come, go and are killed, the coordinator is lost, changes succeed or fail: `desired` is what is to be served."""

    @initialize(topology=st.sampled_from(["colocated", "fanin"]))
    def begin(self, topology: str) -> None:
        self.patch = pytest.MonkeyPatch()
        hurry(self.patch)
        self.loop = asyncio.new_event_loop()
        self.service = self.run(started(topology))
        self.desired: Desired = one("1")
        self.service.bad.add("bad")

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(what, 30))

    def ask(self, change: Coroutine[Any, Any, Any], expected: Any) -> None:
        """Has the coordinator make a change that `expected` makes of the plain data."""
        try:
            wanted = expected()
        except DPIFrameError as error:
            with pytest.raises(type(error)):
                self.run(change)
            return
        self.run(change)
        self.desired = wanted

    @rule(version=st.sampled_from("12345"), live=st.booleans())
    def put(self, version: str, live: bool) -> None:
        self.ask(put(self.service, version, live=live), lambda: self.desired.with_release(release(version), live=live))

    @rule()
    def put_a_bad_one(self) -> None:
        with pytest.raises(LoadFailed):
            self.run(put(self.service, "bad"))

    @rule(version=st.sampled_from("12345"))
    def drop(self, version: str) -> None:
        state = self.desired.model("m")
        self.ask(self.service.coordinator.drop("m", version), lambda: self.desired.changed("m", state.without(version)))

    @rule()
    def roll_back(self) -> None:
        state = self.desired.model("m")
        self.ask(self.service.coordinator.roll_back("m"), lambda: self.desired.changed("m", state.rolled_back()))

    @rule(version=st.sampled_from("12345"), percent=st.sampled_from([1.0, 50.0]))
    def share(self, version: str, percent: float) -> None:
        canary, state = CanaryOf(version=version, percent=percent), self.desired.model("m")

        def expected() -> Desired:
            shared = state.with_canary(canary)
            return self.desired if shared == state else self.desired.changed("m", shared)

        self.ask(self.service.coordinator.share("m", canary), expected)

    @rule(part=st.sampled_from(["scores", "answers"]))
    def start(self, part: str) -> None:
        self.run(self.service.start(part))

    @precondition(lambda self: min(len(self.service.having("scores")), len(self.service.having("answers"))) > 1)
    @rule(which=st.integers(0, 1))
    def kill(self, which: int) -> None:
        self.run(self.service.replicas[which].kill())

    @precondition(lambda self: min(len(self.service.having("scores")), len(self.service.having("answers"))) > 1)
    @rule()
    def stop(self) -> None:
        replica = self.service.replicas[-1]
        self.run(replica.follower.stop())
        self.service.replicas.remove(replica)

    @rule()
    def lose_the_coordinator(self) -> None:
        async def found() -> None:  # within the time that a new one gives them, which stands still between two rules
            self.service.restart_coordinator()
            await until(lambda: len(self.service.coordinator._seats) == len(self.service.replicas))

        self.run(found())

    @invariant()
    def everybody_serves_the_same_and_holds_nothing_else(self) -> None:
        def same(replica: FakeReplica) -> bool:
            return replica.routed == self.desired and replica.loaded == self.desired.releases

        async def settled() -> None:
            await until(lambda: all(map(same, self.service.replicas)))

        self.run(settled())
        for replica in self.service.replicas:
            replica.follower.check()

    def teardown(self) -> None:
        if hasattr(self, "service"):
            self.run(self.service.close())
            self.loop.close()
            self.patch.undo()


AnyHistory.TestCase.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
test_all_replicas_serve_the_same_after_any_history = AnyHistory.TestCase
