"""The fan-in between processes: what a death at either end means to the other, and who is let in."""

import asyncio
import errno
import gc
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments import door
from deployments.batching import Scored
from deployments.channel import NO_DEADLINE, Ask, Channel, Status, shared_memory
from deployments.door import Hello, Welcome, meeting_place
from deployments.doorkeeper import Doorkeeper
from deployments.fanin_engine import FanInEngine, Peer
from deployments.fanin_link import Link
from deployments.fanin_scorer import FanInScorer, slab_bytes
from dpiframe_core.errors import ConfigError, DeadlineExceeded, Overloaded, TooLarge, Unavailable
from dpiframe_core.types import BatchResult, RowBlock
from tests.deployments.fanin_doubles import FINGERPRINT, connect, engine_of, scorer_of
from tests.deployments.serving_doubles import LAYOUT, FakeDevice, numbered, numbers, until

ROOT = Path(__file__).parents[2]


class Process:
    """One of `fanin_process`. Killed at the end if it still runs."""

    def __init__(self, role: str, node: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.deployments.fanin_process", role, node],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self.hear() == {"state": "ready"}

    def hear(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())  # type: ignore[no-any-return]

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def state(self) -> dict[str, Any]:
        self.tell("state")
        return self.hear()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def node(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()}-{request.node.name}"


@pytest.fixture
def start(node: str) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def process(role: str) -> Process:
        started.append(Process(role, node))
        return started[-1]

    yield process
    for one in started:
        one.kill()
        assert one.popen.stdin is not None
        assert one.popen.stdout is not None
        one.popen.stdin.close()
        one.popen.stdout.close()


def with_scorer(node: str, body: Callable[[FanInScorer], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        scorer = FanInScorer(meeting_place("test", node), "m", FINGERPRINT, LAYOUT, 1, most_rows=2000)
        try:
            async with asyncio.timeout(60):
                await body(scorer)
        finally:
            await scorer.close()

    asyncio.run(main())


def rows_of(scored: Scored) -> list[int]:
    return [int(score) for score in scored.scores[:, 0]]


def test_scores_of_another_process_are_the_requests_own_whether_encoded_in_place_or_not(
    node: str, start: Callable[[str], Process]
) -> None:
    engine = start("engine")

    async def body(scorer: FanInScorer) -> None:
        assert not scorer.accepting
        await scorer.found(1)
        assert scorer.accepting
        placed = scorer.allocate(LAYOUT, 40, 1)
        placed.fill((numbered(7, 40),))
        answers = await asyncio.gather(scorer.submit(placed), *(scorer.submit(numbered(i, 1 + i % 40)) for i in range(300)))
        assert rows_of(answers[0]) == numbers(7, 40)
        assert [rows_of(answer) for answer in answers[1:]] == [numbers(i, 1 + i % 40) for i in range(300)]
        assert scorer.batch_sizes.sum() == engine.state()["batches"]
        assert scorer.batch_sizes @ np.arange(17) == 40 + sum(1 + i % 40 for i in range(300))
        assert (scorer.queued_rows, scorer.inflight_rows) == (0, 0)
        assert scorer.busy_s > 0

    with_scorer(node, body)


def test_the_death_of_the_engine_fails_what_it_had_at_once_and_the_next_engine_is_found(
    node: str, start: Callable[[str], Process], caplog: pytest.LogCaptureFixture
) -> None:
    first = start("stuck")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        tasks = [asyncio.create_task(scorer.submit(numbered(i, 30))) for i in range(5)]
        await until(lambda: scorer.inflight_rows >= 30)
        first.kill()
        for task in tasks:
            with pytest.raises(Unavailable, match="engine: got its end with this request there, expected scores"):
                await task
        assert not scorer.accepting
        with pytest.raises(Unavailable, match="engine: got none on this node, expected one"):
            await scorer.submit(numbered(9, 1))
        start("engine")
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(8, 30))) == numbers(8, 30)
        assert scorer._slab.free_bytes == scorer._slab.size

    with_scorer(node, body)


def test_the_death_of_an_ingress_takes_its_rows_out_of_the_queue_and_nobody_elses(
    node: str, start: Callable[[str], Process]
) -> None:
    engine = start("stuck")
    doomed = start("ingress")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        await until(lambda: engine.state()["inflight_rows"] >= 30)
        mine = asyncio.create_task(scorer.submit(numbered(1, 5)))
        await asyncio.sleep(0)
        assert engine.state()["peers"] == 2
        doomed.kill()
        await until(lambda: engine.state()["peers"] == 1)
        assert engine.state()["queued_rows"] == 0  # mine is not read before a lane is free
        assert not mine.done()
        mine.cancel()

    with_scorer(node, body)


def test_an_ingress_that_dies_under_load_harms_no_other(node: str, start: Callable[[str], Process]) -> None:
    engine = start("engine")
    doomed = start("ingress")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        for i in range(200):
            if i == 50:
                doomed.kill()
            assert rows_of(await scorer.submit(numbered(i, 30))) == numbers(i, 30)
        await until(lambda: engine.state()["peers"] == 1)

    with_scorer(node, body)


def test_an_engine_that_stops_answers_what_it_has_and_its_ingresses_go_to_the_other(
    node: str, start: Callable[[str], Process]
) -> None:
    first, second = start("engine"), start("engine")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(2)
        done = 0

        async def client(number: int) -> None:
            nonlocal done
            while second.state()["batches"] < 100:
                assert rows_of(await scorer.submit(numbered(number, 10))) == numbers(number, 10)
                done += 1

        clients = [asyncio.create_task(client(i)) for i in range(8)]
        await until(lambda: done > 20)
        first.tell("close")
        await asyncio.gather(*clients)
        await until(lambda: scorer.engines == 1)
        assert first.hear() == {"state": "closed"}

    with_scorer(node, body)


def test_the_last_engine_that_stops_serves_its_ingresses_until_they_leave(node: str, start: Callable[[str], Process]) -> None:
    engine = start("engine")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        engine.tell("close")
        await until(lambda: scorer._links[0].board.leaving)
        for i in range(20):
            assert rows_of(await scorer.submit(numbered(i, 10))) == numbers(i, 10)

    with_scorer(node, body)
    assert engine.hear() == {"state": "closed"}


def test_a_deadline_is_answered_while_every_lane_is_busy(node: str, start: Callable[[str], Process]) -> None:
    start("stuck")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        first = asyncio.create_task(scorer.submit(numbered(1, 32)))
        await until(lambda: scorer.inflight_rows >= 16)
        with pytest.raises(DeadlineExceeded, match="deadline: got past it in the queue or on the device, expected the scores"):
            await scorer.submit(numbered(2, 3), deadline=time.monotonic() + 0.05)
        with pytest.raises(DeadlineExceeded, match="deadline: got past it before it was queued"):
            await scorer.submit(numbered(2, 3), deadline=time.monotonic())
        assert not first.done()
        first.cancel()

    with_scorer(node, body)


# What the engine reads and where a request goes, stepped by hand.


def test_the_device_is_given_the_rows_where_the_ingress_encoded_them_and_parts_of_them_too() -> None:
    given: list[bool] = []
    device = FakeDevice()

    def run(blocks: Sequence[RowBlock]) -> BatchResult:
        given.extend(np.shares_memory(block.candidate_ids, peer.slab) for block in blocks)
        return device(blocks)

    engine = engine_of(run, time.monotonic)

    async def main() -> None:
        nonlocal peer
        scorer = scorer_of(time.monotonic)
        _, peer = connect(scorer, engine)
        block = scorer.allocate(LAYOUT, 25, 1)
        block.fill((numbered(3, 25),))
        tasks = [asyncio.create_task(scorer.submit(b)) for b in (block, numbered(4, 2))]
        await asyncio.sleep(0)
        while engine.lanes.step():
            pass
        assert [rows_of(await task) for task in tasks] == [numbers(3, 25), numbers(4, 2)]
        await scorer.close()

    peer: Peer
    asyncio.run(main())
    assert given == [True] * 4  # three parts, one of them beside the other request
    engine.close(0)
    peer.connection.close()


def test_an_expiry_that_is_told_late_leaves_the_next_request_of_its_slot_alone() -> None:
    now = 100.0
    device = FakeDevice()
    engine = engine_of(device, lambda: now)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel_fd, slab_fd = shared_memory("test", Channel.NBYTES), shared_memory("test", 1 << 16)
    channel = Channel(channel_fd)
    engine.join(Peer(there, slab_fd, channel_fd, os.eventfd(0, os.EFD_NONBLOCK), 1 << 16))

    def ask(kind: Ask, deadline: float = NO_DEADLINE) -> None:
        channel.asks.put(kind, 0, 0, 1, 1, deadline, now, 0)
        channel.asks.publish()

    def answers() -> list[Status]:
        return [Status(status) for _, status, *_ in channel.answers.new()]

    lanes = engine.lanes
    ask(Ask.SCORE, now + 1)
    with lanes.lock:
        engine.take_in(now)
        now += 2
        parts, expired = lanes.queue.form(now)  # one lane finds it expired, and gives the lock away
        assert (parts, len(expired)) == ([], 1)
    ask(Ask.CANCEL)
    with lanes.lock:
        engine.take_in(now)  # another one reads that nobody waits for it any more
    assert answers() == [Status.CANCELLED]
    ask(Ask.SCORE)  # so the slot is free
    with lanes.lock:
        engine.take_in(now)
    engine.expired(expired)
    assert lanes.step()
    assert answers() == [Status.OK]
    assert device.batches == [[0]]
    engine.close(0)
    here.close()
    there.close()


def test_a_request_goes_to_the_engine_with_the_fewest_rows_and_to_one_that_leaves_only_if_there_is_no_other() -> None:
    engines = [engine_of(FakeDevice(), time.monotonic) for _ in range(3)]
    peers: list[Peer] = []

    async def main() -> None:
        scorer = scorer_of(time.monotonic)
        ends = [connect(scorer, engine, index) for index, engine in enumerate(engines)]
        links = [link for link, _ in ends]
        peers.extend(peer for _, peer in ends)

        async def goes_to(rows: int) -> int:
            before = [link.waiting_rows for link in links]
            tasks.append(asyncio.create_task(scorer.submit(numbered(len(tasks), rows))))
            await asyncio.sleep(0)
            after = [link.waiting_rows for link in links]
            return [b - a for a, b in zip(before, after, strict=True)].index(rows)

        tasks: list[asyncio.Task[Scored]] = []
        assert [await goes_to(rows) for rows in (5, 3, 1, 4)] == [0, 1, 2, 2]
        engines[1].board.leave()
        assert await goes_to(2) == 0
        while engines[0].lanes.step():
            pass
        engines[0].board.leave()
        engines[2].board.leave()
        assert await goes_to(6) == 0
        for engine in engines:
            while engine.lanes.step():
                pass
        await asyncio.gather(*tasks)
        await scorer.close()

    asyncio.run(main())
    for engine, peer in zip(engines, peers, strict=True):
        engine.close(0)
        peer.connection.close()


def test_an_engine_that_fails_is_left_alone_for_a_second_though_its_queue_is_the_shortest() -> None:
    now = 100.0
    devices = [FakeDevice(), FakeDevice()]
    engines = [engine_of(device, lambda: now) for device in devices]
    peers: list[Peer] = []

    async def main() -> None:
        nonlocal now
        scorer = scorer_of(lambda: now)
        peers.extend(connect(scorer, engine, index)[1] for index, engine in enumerate(engines))

        async def served_by(number: int) -> int:
            """The engine whose device was given the request; no other has one."""
            task = asyncio.create_task(scorer.submit(numbered(number, 1)))
            await asyncio.sleep(0)
            before = [len(device.batches) for device in devices]
            while any(engine.lanes.step() for engine in engines):
                pass
            await asyncio.gather(task, return_exceptions=True)
            return [len(device.batches) - b for device, b in zip(devices, before, strict=True)].index(1)

        devices[0].fail_on = 1000
        assert await served_by(1) == 0  # which fails
        waiting = asyncio.create_task(scorer.submit(numbered(2, 5)))
        await asyncio.sleep(0)
        assert scorer._links[1].load == 5
        now += 0.9
        assert await served_by(3) == 1
        await waiting
        now += 0.2
        assert await served_by(4) == 0
        devices[0].fail_on, devices[1].fail_on = 5000, 6000
        assert await served_by(5) == 0
        assert await served_by(6) == 1
        assert await served_by(7) == 0  # both have failed: the load counts
        await scorer.close()

    asyncio.run(main())
    for engine, peer in zip(engines, peers, strict=True):
        engine.close(0)
        peer.connection.close()


def test_batches_of_engines_with_different_bounds_are_counted_together() -> None:
    engines = [engine_of(FakeDevice(), time.monotonic, max_batch_rows=rows) for rows in (10, 30, 20)]
    peers: list[Peer] = []

    async def main() -> None:
        scorer = scorer_of(time.monotonic)
        peers.extend(connect(scorer, engine, index)[1] for index, engine in enumerate(engines))
        for i, engine in enumerate(engines):
            engine.board.counts[10] += 1 + i
            engine.board.counts[-1] += 10
        assert {i: int(count) for i, count in enumerate(scorer.batch_sizes) if count} == {10: 16, 20: 10, 30: 10}
        assert len(scorer.batch_sizes) == 31
        assert engines[1].board.counts[10] == 2
        await scorer.close()

    asyncio.run(main())
    for engine, peer in zip(engines, peers, strict=True):
        engine.close(0)
        peer.connection.close()


def test_a_request_without_a_free_slot_is_told_so_and_to_wait_for_a_batch() -> None:
    now = 100.0
    engine = engine_of(FakeDevice(), lambda: now)

    async def main() -> None:
        scorer = scorer_of(lambda: now)
        link, peer = connect(scorer, engine)
        engine.board.write(0, 0, 0.0, 0.5)
        link._free.clear()
        message = "requests: got 4097 of this ingress at one engine, expected at most 4096; retry after 5.000 s"
        with pytest.raises(Overloaded, match=message) as refused:  # ten rows at half a second
            await scorer.submit(numbered(1, 1))
        assert refused.value.retry_after_s == 5.0
        await scorer.close()
        engine.close(0)
        peer.connection.close()

    asyncio.run(main())


# Who is let in.


@pytest.fixture
def engine(node: str) -> Iterator[FanInEngine]:
    """With its door, in this process."""
    engine = FanInEngine(FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=16, lanes=1, max_queued_rows=100)
    keeper = Doorkeeper(meeting_place("test", node), {"m": engine})
    yield engine
    keeper.close(drain_s=0)
    for thread in engine.lanes.threads:
        thread.join(10)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("model", "fingerprint", "why"),
    [
        ("other", FINGERPRINT, "model: got 'other', expected one of ['m']"),
        ("m", "0" * 64, "bundle: got fingerprint 0000000000000000, expected ffffffffffffffff"),
    ],
)
def test_an_ingress_of_another_model_or_bundle_is_told_why_it_is_not_served(
    engine: FanInEngine, node: str, model: str, fingerprint: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        scorer = FanInScorer(meeting_place("test", node), model, fingerprint, LAYOUT, 1, most_rows=100)
        await until(lambda: f"engine 0: engine: {why}" in caplog.text)
        assert not scorer.accepting
        await scorer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert engine.peers == 0


def test_whoever_says_something_else_is_shown_out_and_leaves_nothing(
    engine: FanInEngine, node: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = meeting_place("test", node)
    before = descriptors()
    for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"model": "m"}', b""):
        with door.connect(place, 0) as stranger:
            stranger.send(said) if said else stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    hello = Hello(model="m", fingerprint=FINGERPRINT, slab_bytes=4096)
    for fds in ((), (0,), (0, 0, 0)):  # none, too few, and what is no shared memory
        with door.connect(place, 0) as stranger:
            door.send(stranger, hello, fds)
            assert stranger.recv(100) == b""
    shared = shared_memory("test", 4096), shared_memory("test", Channel.NBYTES), os.eventfd(0)
    for size in (-1, 0, 4097, 2**47, 2**48, 2**63, 2**100):
        with door.connect(place, 0) as stranger:
            door.send(stranger, hello.model_copy(update={"slab_bytes": size}), shared)
            assert stranger.recv(100) == b""
    for fd in shared:
        os.close(fd)

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

    with_scorer(node, body)
    give_up = time.monotonic() + 10
    while descriptors() > before and time.monotonic() < give_up:
        gc.collect()  # a mapping keeps its file open, and the door may still be saying goodbye
        time.sleep(0.01)
    assert descriptors() <= before


def test_a_door_that_has_no_descriptor_for_an_ingress_opens_once_it_has(
    engine: FanInEngine, node: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, iter(range(2))

    def full(listener: socket.socket) -> tuple[socket.socket, Any]:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", full)

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

    with_scorer(node, body)
    assert caplog.text.count("an ingress could not come in: [Errno 24] Too many open files") == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import
def test_an_engine_whose_door_has_broken_is_unwell(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.engine_replica import EngineReplica

    keeper = Doorkeeper(meeting_place("test", node), {})
    replica: Any = SimpleNamespace(_engines=[], _door=keeper)
    EngineReplica.check_health(replica)
    with monkeypatch.context() as broken:
        broken.setattr(keeper, "_thread", threading.Thread())
        with pytest.raises(Unavailable, match="door: got the end of its thread, expected it to run until it is closed"):
            EngineReplica.check_health(replica)
    keeper.close(0)
    EngineReplica.check_health(replica)


def test_what_goes_wrong_with_one_engine_does_not_end_the_search_for_others(
    node: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start: Callable[[str], Process]
) -> None:
    greet = Link.greet

    def odd(connection: socket.socket, index: int, *rest: Any) -> Link:
        if index == 0:
            connection.close()
            raise OverflowError("a board of 2**80 bytes")
        return greet(connection, index, *rest)

    monkeypatch.setattr(Link, "greet", odd)
    start("engine")

    async def body(scorer: FanInScorer) -> None:
        await until(lambda: "engine 0: a board of 2**80 bytes" in caplog.text)
        start("engine")
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

    with_scorer(node, body)


def test_an_engine_that_closes_before_it_has_answered_is_as_one_that_is_not_there(
    node: str, caplog: pytest.LogCaptureFixture, start: Callable[[str], Process]
) -> None:
    listener = door.listen(meeting_place("test", node))

    async def body(scorer: FanInScorer) -> None:
        await asyncio.to_thread(select.select, [listener], [], [], 20)
        listener.close()
        start("engine")
        await scorer.found(1)
        assert scorer._refused_until == {}

    with_scorer(node, body)


def test_an_engine_asks_ingresses_to_leave_only_when_they_cannot_come_back(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FanInEngine(FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=16, lanes=1, max_queued_rows=100)
    place = meeting_place("test", node)
    keeper = Doorkeeper(place, {"m": engine})
    left = []

    def leave() -> None:
        with pytest.raises(ConnectionRefusedError):
            door.connect(place, 0)
        left.append(True)

    monkeypatch.setattr(engine.board, "leave", leave)
    keeper.close(0)
    assert left == [True]


def test_a_process_of_another_user_is_refused(engine: FanInEngine, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, uid = meeting_place("test", node), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(Unavailable, match=f"door: got a process of user {uid}, expected one of user {uid + 1}"):
        door.connect(place, 0)


def test_applications_and_nodes_meet_apart() -> None:
    places = {meeting_place(application, node) for application in ("a", "b") for node in ("x", "y")}
    assert len(places) == 4
    assert all(len(place) < 100 for place in places)


def test_engines_of_a_node_have_names_of_their_own_and_there_are_not_too_many(node: str) -> None:
    place = meeting_place("test", node)
    listeners = [door.listen(place) for _ in range(door.MOST_ENGINES)]
    with pytest.raises(ConfigError, match="replicas: got more than 16 engines of one application on a node"):
        door.listen(place)
    listeners.pop(3).close()
    listeners.append(door.listen(place))
    assert listeners[-1].getsockname() == f"{place}-3".encode()
    for listener in listeners:
        listener.close()


def test_a_message_of_another_kind_or_with_other_descriptors_is_refused() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        door.send(here, Welcome(), ())
        with pytest.raises(Unavailable, match="door: model: got nothing, expected a value"):
            door.receive(there, Hello, 3)
        door.send(here, Welcome(), (0,))
        with pytest.raises(Unavailable, match="door: got 1 descriptors, expected 2"):
            door.receive(there, Welcome, 2)
        here.close()
        with pytest.raises(Unavailable, match="door: got the end of the connection, expected a message"):
            door.receive(there, Welcome, 2)


# Bounds.


def test_a_request_that_never_fits_is_too_large_and_a_full_slab_is_overload(engine: FanInEngine, node: str) -> None:
    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        with pytest.raises(TooLarge, match="rows: got 101, expected at most 100, all that may wait at once"):
            await scorer.submit(numbered(1, 101))
        held = [scorer.allocate(LAYOUT, 1000, 1), scorer.allocate(LAYOUT, 1000, 1)]
        with pytest.raises(
            Overloaded, match=r"slab: got \d+ bytes free at this ingress, expected 12192 in one piece"
        ) as refused:
            held.extend(scorer.allocate(LAYOUT, 1000, 1) for _ in range(1000))
        assert 0 < refused.value.retry_after_s <= 60
        held.clear()
        assert rows_of(await scorer.submit(numbered(1, 100))) == numbers(1, 100)

    with_scorer(node, body)


@pytest.mark.parametrize("rows", [1, 7, 100, 1000])
def test_the_slab_holds_all_rows_that_may_be_there_whatever_the_requests(rows: int) -> None:
    """Every request has its own contexts, header, alignment and scores; 4,096 of them at the most."""
    most = min(65536 + 8192, rows * 4096)
    each = -(-(LAYOUT.offsets(rows, rows)[-1] + rows * 4) // 64) * 64
    assert most // rows * each <= slab_bytes(LAYOUT, 1, 65536 + 8192)


def test_a_peer_that_writes_nonsense_into_its_ring_is_dropped(engine: FanInEngine, node: str) -> None:
    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        (link,) = scorer._links
        link._channel.asks.put(1, 0, scorer._slab.size - 64, 100, 1, 0.0, 0.0, 0)
        link._channel.asks.publish()
        task = asyncio.create_task(scorer.submit(numbered(1, 3)))
        with pytest.raises(Unavailable, match="engine: got its end"):
            await task
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

    with_scorer(node, body)
