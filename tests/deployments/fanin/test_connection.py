"""Both ends of the fan-in in one process, stepped by hand: where requests go, what the engine reads, how answers come."""

import asyncio
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.batching.scorer import Scored
from deployments.fanin import batcher as batcher_module
from deployments.fanin import connection as connection_module
from deployments.fanin import handshake
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.handshake import Hello
from deployments.fanin.peer import Peer
from deployments.fanin.request_memory import RequestMemory
from deployments.fanin.rings import NO_DEADLINE, Ask, Rings, Status
from deployments.fanin.shared_memory import shared_memory
from dpiframe_core.errors import Overloaded
from dpiframe_core.features.row_block import BatchResult, RowBlock
from tests.deployments.fanin.doubles import FINGERPRINT, connect, engine_of, rows_of, scorer_of
from tests.deployments.serving_doubles import LAYOUT, FakeDevice, numbered, numbers, until


def test_a_lone_request_is_looked_out_for_only_if_that_was_enough_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_LINGER_S", 20.0)
    engine = engine_of(FakeDevice(), time.monotonic)
    over = threading.Event()

    def lane() -> None:
        while not over.wait(0.001):
            engine.dispatcher.step()

    async def main() -> None:
        scorer = scorer_of(time.monotonic)
        connection, peer = connect(scorer, engine)
        asyncio.get_running_loop().remove_reader(connection._answer_fd)  # nobody wakes the loop now

        async def read_all() -> None:
            await until(lambda: connection._read_answers() or not connection._sent)

        scored = await scorer.submit(numbered(3, 5))
        assert scored.scores[:, 0].tolist() == numbers(3, 5)
        assert 0 < connection._lone_s < 20

        connection._lone_s = 21.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scorer.submit(numbered(4, 5)), 0.2)
        await read_all()
        connection._lone_s = 21.0
        reply = asyncio.get_running_loop().create_future()
        connection.send(*scorer._placed(numbered(5, 5)), None, time.monotonic(), 0, reply)
        connection.flush()
        connection._lone_s = 0.0  # but with that one there, the next ones sleep
        sent = [asyncio.create_task(scorer.submit(numbered(i, 5))) for i in (6, 7)]
        await asyncio.wait(sent, timeout=0.2)
        assert not any(task.done() for task in sent)
        await read_all()
        assert [(await task).scores[0, 0] for task in sent] == [6000, 7000]
        await scorer.close()
        peer.sock.close()

    thread = threading.Thread(target=lane)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        over.set()
        thread.join()
        engine.close(0)


def test_the_device_is_given_the_rows_where_the_ingress_encoded_them_and_parts_of_them_too() -> None:
    given: list[bool] = []
    device = FakeDevice()

    def run(blocks: Sequence[RowBlock]) -> BatchResult:
        given.extend(np.shares_memory(block.candidate_ids, peer.memory) for block in blocks)
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
        while engine.dispatcher.step():
            pass
        assert [rows_of(await task) for task in tasks] == [numbers(3, 25), numbers(4, 2)]
        await scorer.close()

    peer: Peer
    asyncio.run(main())
    assert given == [True] * 4  # three parts, one of them beside the other request
    engine.close(0)
    peer.sock.close()


def test_an_expiry_that_is_told_late_leaves_the_next_request_of_its_slot_alone() -> None:
    now = 100.0
    device = FakeDevice()
    engine = engine_of(device, lambda: now)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rings_fd, memory_fd = shared_memory("test", Rings.NBYTES), shared_memory("test", 1 << 16)
    rings = Rings(rings_fd)
    engine.join(Peer(there, memory_fd, rings_fd, os.eventfd(0, os.EFD_NONBLOCK), 1 << 16))

    def ask(kind: Ask, deadline: float = NO_DEADLINE) -> None:
        rings.asks.put(kind, 0, 0, 1, 1, deadline, now, 0)
        rings.asks.publish()

    def answers() -> list[Status]:
        return [Status(status) for _, status, *_ in rings.answers.new()]

    dispatcher = engine.dispatcher
    ask(Ask.SCORE, now + 1)
    with dispatcher.lock:
        engine.take_in(now)
        now += 2
        parts, expired = dispatcher.queue.form(now)  # one lane finds it expired, and gives the lock away
        assert (parts, len(expired)) == ([], 1)
    ask(Ask.CANCEL)
    with dispatcher.lock:
        engine.take_in(now)  # another one reads that nobody waits for it any more
    assert answers() == [Status.CANCELLED]
    ask(Ask.SCORE)  # so the slot is free
    with dispatcher.lock:
        engine.take_in(now)
    engine.expired(expired)
    assert dispatcher.step()
    assert answers() == [Status.OK]
    assert device.batches == [[0]]
    engine.close(0)
    here.close()
    there.close()


class Ingress:
    """The other end of a peer of `engine`, which writes what it likes into its rings."""

    def __init__(self, engine: FanInBatcher, memory_bytes: int = 1 << 16) -> None:
        self.sock, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rings_fd, memory_fd = shared_memory("test", Rings.NBYTES), shared_memory("test", memory_bytes)
        self.rings = Rings(rings_fd)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.memory = np.frombuffer(mmap.mmap(memory_fd, memory_bytes), np.uint8)
        self.peer: Peer | None = Peer(there, memory_fd, rings_fd, self.wake_fd, memory_bytes)
        engine.join(self.peer)

    def ask(self, slot: int, offset: int, number: int, rows: int) -> None:
        RowBlock.formatted(self.memory[offset:], LAYOUT, rows, 1).fill((numbered(number, rows),))
        self.rings.asks.put(Ask.SCORE, slot, offset, rows, 1, NO_DEADLINE, 0.0, 0)
        self.rings.asks.publish()

    def scores(self, offset: int, rows: int) -> list[int]:
        at = offset + LAYOUT.offsets(rows, 1)[-1]
        return [int(score) for score in self.memory[at : at + 4 * rows].view(np.float32)]


def test_requests_of_any_size_at_one_place_one_after_the_other_get_their_own_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of known places are kept, and forgotten when there are too many."""
    monkeypatch.setattr(batcher_module, "_KNOWN_BLOCKS", 3)
    engine = engine_of(FakeDevice(), time.monotonic, max_batch_rows=4)
    ingress = Ingress(engine)
    assert ingress.peer is not None
    for number, rows in enumerate((5, 5, 1, 9, 5, 2, 3, 9, 5)):
        ingress.ask(0, 4096, number, rows)
        while engine.dispatcher.step():
            pass
        assert [(slot, status) for slot, status, *_ in ingress.rings.answers.new()] == [(0, Status.OK)]
        assert ingress.scores(4096, rows) == numbers(number, rows)
        assert len(ingress.peer.blocks) <= 3
    engine.leave(ingress.peer)
    assert not ingress.peer.blocks
    ingress.sock.close()
    ingress.peer.sock.close()
    engine.close(0)


def test_where_rows_are_read_ahead_each_request_has_a_block_of_its_own() -> None:
    """It says whether its rows were read, so it must not be an earlier request's."""
    told: list[RowBlock] = []
    engine = FanInBatcher(
        FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=10, lanes=0, max_queued_rows=100, read_ahead=told.append
    )
    ingress = Ingress(engine)
    for number in (1, 2):
        ingress.ask(0, 0, number, 5)
        assert engine.dispatcher.step()
        assert ingress.scores(0, 5) == numbers(number, 5)
    assert len(told) == 2
    assert told[0] is not told[1]
    engine.close(0)
    assert ingress.peer is not None
    ingress.sock.close()
    ingress.peer.sock.close()


def test_no_system_call_is_made_under_the_lock_for_a_run_and_each_peer_of_it_is_woken_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(FakeDevice(), time.monotonic)
    ingresses = [Ingress(engine) for _ in range(3)]
    for i, ingress in enumerate(ingresses[:2]):
        for slot in (0, 1):
            ingress.ask(slot, slot * 4096, 10 * i + slot, 2)
    woken: list[int] = []

    def write(fd: int, value: int) -> None:
        assert not engine.dispatcher.lock.locked()
        woken.append(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_write", write)
        assert engine.dispatcher.step()
    assert sorted(woken) == sorted(ingress.wake_fd for ingress in ingresses[:2])
    assert [len(ingress.rings.answers.new()) for ingress in ingresses] == [2, 2, 0]
    engine.close(0)
    for ingress in ingresses:
        assert ingress.peer is not None
        ingress.sock.close()
        ingress.peer.sock.close()


def test_a_peer_that_leaves_during_a_run_is_written_no_more_and_what_wakes_it_is_closed_after_the_last_use() -> None:
    device = FakeDevice()

    def run(blocks: Sequence[RowBlock]) -> BatchResult:
        assert ingress.peer is not None
        engine.leave(ingress.peer)
        os.fstat(ingress.wake_fd)
        ingress.peer.sock.close()
        ingress.peer = None
        return device(blocks)

    engine = engine_of(run, time.monotonic)
    ingress = Ingress(engine)
    ingress.ask(0, 0, 7, 5)
    assert engine.dispatcher.step()
    assert ingress.scores(0, 5) == [0] * 5
    assert ingress.rings.answers.new() == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ingress.wake_fd)
    ingress.sock.close()
    engine.close(0)


def test_a_request_goes_to_the_engine_with_the_fewest_rows_and_to_one_that_leaves_only_if_there_is_no_other() -> None:
    engines = [engine_of(FakeDevice(), time.monotonic) for _ in range(3)]
    peers: list[Peer] = []

    async def main() -> None:
        scorer = scorer_of(time.monotonic)
        ends = [connect(scorer, engine, index) for index, engine in enumerate(engines)]
        connections = [connection for connection, _ in ends]
        peers.extend(peer for _, peer in ends)

        async def goes_to(rows: int) -> int:
            before = [connection.waiting_rows for connection in connections]
            tasks.append(asyncio.create_task(scorer.submit(numbered(len(tasks), rows))))
            await asyncio.sleep(0)
            after = [connection.waiting_rows for connection in connections]
            return [b - a for a, b in zip(before, after, strict=True)].index(rows)

        tasks: list[asyncio.Task[Scored]] = []
        assert [await goes_to(rows) for rows in (5, 3, 1, 4)] == [0, 1, 2, 2]
        engines[1].board.leave()
        assert await goes_to(2) == 0
        while engines[0].dispatcher.step():
            pass
        engines[0].board.leave()
        engines[2].board.leave()
        assert await goes_to(6) == 0
        for engine in engines:
            while engine.dispatcher.step():
                pass
        await asyncio.gather(*tasks)
        await scorer.close()

    asyncio.run(main())
    for engine, peer in zip(engines, peers, strict=True):
        engine.close(0)
        peer.sock.close()


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
            while any(engine.dispatcher.step() for engine in engines):
                pass
            await asyncio.gather(task, return_exceptions=True)
            return [len(device.batches) - b for device, b in zip(devices, before, strict=True)].index(1)

        devices[0].fail_on = 1000
        assert await served_by(1) == 0  # which fails
        waiting = asyncio.create_task(scorer.submit(numbered(2, 5)))
        await asyncio.sleep(0)
        assert scorer.search.connections[1].load == 5
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
        peer.sock.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_lane_is_woken_unless_all_have_a_run(busy: bool) -> None:
    engine = engine_of(FakeDevice(), time.monotonic)

    async def main() -> None:
        scorer = scorer_of(time.monotonic)
        _, peer = connect(scorer, engine)
        engine.board.write_busy(busy)
        waits = asyncio.create_task(scorer.submit(numbered(1, 3)))
        await asyncio.sleep(0.01)
        assert bool(select.select([engine.dispatcher.wake_fd], [], [], 0)[0]) == (not busy)
        assert engine.waiting  # a lane that looks before it sleeps finds it
        assert engine.dispatcher.step()
        assert rows_of(await waits) == numbers(1, 3)
        await scorer.close()
        peer.sock.close()

    asyncio.run(main())
    engine.close(0)


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
        peer.sock.close()


def test_a_request_without_a_free_slot_is_told_so_and_to_wait_for_a_batch() -> None:
    now = 100.0
    engine = engine_of(FakeDevice(), lambda: now)

    async def main() -> None:
        scorer = scorer_of(lambda: now)
        connection, peer = connect(scorer, engine)
        engine.board.write(0, 0, 0.5)
        connection._free.clear()
        message = "requests: got 4097 of this ingress at one engine, expected at most 4096; retry after 5.000 s"
        with pytest.raises(Overloaded, match=message) as refused:  # ten rows at half a second
            await scorer.submit(numbered(1, 1))
        assert refused.value.retry_after_s == 5.0
        await scorer.close()
        engine.close(0)
        peer.sock.close()

    asyncio.run(main())


def test_a_greeting_that_nobody_waits_for_any_more_leaves_nothing_open() -> None:
    """The engine, which is the other end here, never answers."""
    memory = RequestMemory(4096)

    async def main() -> list[str]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        await asyncio.to_thread(int)  # there is a thread
        before = sorted(os.listdir("/proc/self/fd"))
        hello = Hello(model="m", fingerprint="f", layout=(1,), memory_bytes=4096)
        greeting = asyncio.create_task(handshake.greeted(ours, 0, hello, memory))
        assert (await asyncio.to_thread(theirs.recv, 1 << 16)).startswith(b"{")
        greeting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await greeting
        theirs.close()
        return before

    before = asyncio.run(main())  # whose end waits for its threads
    assert len(os.listdir("/proc/self/fd")) < len(before)
    memory.close()


def test_what_a_greeting_comes_to_when_nobody_waits_for_it_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, closed = threading.Event(), threading.Event(), threading.Event()

    def greet(*given: object) -> SimpleNamespace:
        begun.set()
        goes_on.wait(10)
        return SimpleNamespace(close=closed.set)

    monkeypatch.setattr(handshake, "greet", greet)
    memory = RequestMemory(4096)

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hello = Hello(model="m", fingerprint="f", layout=(1,), memory_bytes=4096)
        greeting = asyncio.create_task(handshake.greeted(ours, 0, hello, memory))
        await asyncio.to_thread(begun.wait, 10)
        greeting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await greeting
        goes_on.set()
        while not closed.is_set():
            await asyncio.sleep(0.01)
        ours.close()
        theirs.close()

    asyncio.run(main())
    memory.close()
