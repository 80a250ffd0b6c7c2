"""An engine and its acceptor in one process: who is let in, and within which bounds."""

import asyncio
import errno
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config import MOST_ENGINES, parse_config
from deployments.fanin import handshake
from deployments.fanin.acceptor import Acceptor
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.handshake import Hello, Welcome, meeting_place
from deployments.fanin.rings import Rings
from deployments.fanin.scorer import FanInScorer, memory_bytes
from deployments.fanin.shared_memory import shared_memory
from dpiframe_core.errors import ConfigError, Overloaded, TooLarge, Unavailable
from dpiframe_core.features.block_layout import BlockLayout
from kernels.lookup.id_record import IdRecord
from tests.deployments.fanin.doubles import FINGERPRINT, rows_of, with_scorer
from tests.deployments.serving_doubles import LAYOUT, FakeDevice, numbered, numbers, until

OTHER_LAYOUT = BlockLayout(IdRecord((2, 2)), IdRecord((4,)), context_dense=0, candidate_dense=0)


@pytest.fixture
def node(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()}-{request.node.name}"


@pytest.fixture
def engine(node: str) -> Iterator[FanInBatcher]:
    """With its acceptor, in this process."""
    engine = FanInBatcher(FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=16, lanes=1, max_queued_rows=100)
    acceptor = Acceptor(meeting_place("test", node), {"m": engine})
    yield engine
    acceptor.close(drain_s=0)
    for thread in engine.dispatcher.threads:
        thread.join(10)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("other", FINGERPRINT, LAYOUT), "model: got 'other', expected one of ['m']"),
        (("m", "0" * 64, LAYOUT), "bundle: got fingerprint 0000000000000000, expected ffffffffffffffff"),
        (("m", FINGERPRINT, OTHER_LAYOUT), f"row blocks: got layout {OTHER_LAYOUT.header}, expected {LAYOUT.header}, of one"),
    ],
    ids=["model", "bundle", "layout"],
)
def test_an_ingress_of_another_model_bundle_or_release_is_told_why_it_is_not_served(
    engine: FanInBatcher, node: str, given: tuple[str, str, BlockLayout], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        scorer = FanInScorer(meeting_place("test", node), *given, 1, most_rows=100)
        await until(lambda: f"engine 0: engine: {why}" in caplog.text)
        assert not scorer.accepting
        await scorer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert engine.peers == 0


def test_whoever_says_something_else_is_shown_out_and_leaves_nothing(
    engine: FanInBatcher, node: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = meeting_place("test", node)
    before = descriptors()
    for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"model": "m"}', b""):
        with handshake.connect(place, 0) as stranger:
            stranger.send(said) if said else stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    hello = Hello(model="m", fingerprint=FINGERPRINT, layout=LAYOUT.header, memory_bytes=4096)
    for fds in ((), (0,), (0, 0, 0)):  # none, too few, and what is no shared memory
        with handshake.connect(place, 0) as stranger:
            handshake.send(stranger, hello, fds)
            assert stranger.recv(100) == b""
    shared = shared_memory("test", 4096), shared_memory("test", Rings.NBYTES), os.eventfd(0)
    for size in (-1, 0, 4097, 2**47, 2**48, 2**63, 2**100):
        with handshake.connect(place, 0) as stranger:
            handshake.send(stranger, hello.model_copy(update={"memory_bytes": size}), shared)
            assert stranger.recv(100) == b""
    for fd in shared:
        os.close(fd)

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

    with_scorer(node, body)
    give_up = time.monotonic() + 10
    while descriptors() > before and time.monotonic() < give_up:
        gc.collect()  # a mapping keeps its file open, and the acceptor may not have seen its end yet
        time.sleep(0.01)
    assert descriptors() <= before


def test_a_door_that_has_no_descriptor_for_an_ingress_opens_once_it_has(
    engine: FanInBatcher, node: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
def test_an_engine_whose_acceptor_has_broken_is_unwell(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.serve.engine_replica import EngineReplica
    from deployments.serve.loaded_models import LoadedModels

    acceptor = Acceptor(meeting_place("test", node), {})
    replica: Any = SimpleNamespace(_loaded=LoadedModels(parse_config({"models": [{"path": "m"}]}, "test")), _acceptor=acceptor)
    replica._follower = SimpleNamespace(check=lambda: None)
    EngineReplica.check_health(replica)
    with monkeypatch.context() as broken:
        broken.setattr(acceptor, "_thread", threading.Thread())
        with pytest.raises(Unavailable, match="acceptor: got the end of its thread, expected it to run until it is closed"):
            EngineReplica.check_health(replica)
    acceptor.close(0)
    EngineReplica.check_health(replica)


def test_versions_of_a_model_come_and_go_at_an_engine_while_others_are_served(node: str) -> None:
    def engine(fingerprint: str) -> FanInBatcher:
        return FanInBatcher(FakeDevice(), LAYOUT, 1, fingerprint, max_batch_rows=16, lanes=1, max_queued_rows=100)

    first, second = engine("1" * 64), engine("2" * 64)
    place, models = meeting_place("test", node), {"m/1": first}
    acceptor = Acceptor(place, models)

    async def main() -> None:
        old = FanInScorer(place, "m/1", "1" * 64, LAYOUT, 1, most_rows=100)
        await old.found(1)
        models["m/2"] = second
        new = FanInScorer(place, "m/2", "2" * 64, LAYOUT, 1, most_rows=100)
        await new.found(1)
        assert rows_of(await old.submit(numbered(1, 3))) == numbers(1, 3)
        assert rows_of(await new.submit(numbered(2, 3))) == numbers(2, 3)
        await old.close()
        await asyncio.to_thread(lambda: acceptor.remove("m/1").close(5))
        late = FanInScorer(place, "m/1", "1" * 64, LAYOUT, 1, most_rows=100)
        await until(lambda: bool(late.search._refused))
        assert not late.accepting
        await late.close()
        assert rows_of(await new.submit(numbered(3, 3))) == numbers(3, 3)
        await new.close()

    asyncio.run(main())
    acceptor.close(drain_s=5)
    assert (first.peers, second.peers) == (0, 0)


@pytest.mark.parametrize(("another_stays", "asked_again_after_s"), [(False, 0.2), (True, 2.0)])
def test_an_engine_that_has_refused_an_ingress_is_soon_asked_again_by_one_that_has_no_other(
    another_stays: bool, asked_again_after_s: float, node: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it is about to load the version that the ingress has already, and the other node's engine ends first."""

    def engine() -> FanInBatcher:
        return FanInBatcher(FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=16, lanes=1, max_queued_rows=100)

    place, now = meeting_place("test", node), [100.0]
    models: dict[str, FanInBatcher] = {}
    acceptors = [Acceptor(place, models)]
    if another_stays:
        acceptors.append(Acceptor(place, {"m": engine()}))

    async def main() -> None:
        scorer = FanInScorer(place, "m", FINGERPRINT, LAYOUT, 1, most_rows=100, clock=lambda: now[0])
        await until(lambda: bool(scorer.search._refused) and len(scorer.connections) == another_stays)
        now[0] += 2.1
        await until(lambda: scorer.search._refused.get(0, (0.0, ""))[0] == now[0])
        models["m"] = engine()
        now[0] += asked_again_after_s - 0.01
        await asyncio.sleep(0.5)
        assert len(scorer.connections) == another_stays
        now[0] += 0.02
        await until(lambda: len(scorer.connections) == another_stays + 1)
        assert caplog.text.count("model: got 'm', expected one of []") == 1
        await asyncio.to_thread(acceptors[0].close, 5)
        await until(lambda: len(scorer.connections) == another_stays)
        models.clear()
        acceptors[0] = Acceptor(place, models)  # another one under the name of the first
        await until(lambda: caplog.text.count("model: got 'm', expected one of []") == 2)
        await scorer.close()

    asyncio.run(main())
    for acceptor in acceptors:
        acceptor.close(drain_s=5)


def test_an_engine_asks_ingresses_to_leave_only_when_they_cannot_come_back(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FanInBatcher(FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=16, lanes=1, max_queued_rows=100)
    place = meeting_place("test", node)
    acceptor = Acceptor(place, {"m": engine})
    left = []

    def leave() -> None:
        with pytest.raises(ConnectionRefusedError):
            handshake.connect(place, 0)
        left.append(True)

    monkeypatch.setattr(engine.board, "leave", leave)
    acceptor.close(0)
    assert left == [True]


def test_a_process_of_another_user_is_refused(engine: FanInBatcher, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, uid = meeting_place("test", node), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(Unavailable, match=f"handshake: got a process of user {uid}, expected one of user {uid + 1}"):
        handshake.connect(place, 0)


def test_applications_and_nodes_meet_apart() -> None:
    places = {meeting_place(application, node) for application in ("a", "b") for node in ("x", "y")}
    assert len(places) == 4
    assert all(len(place) < 100 for place in places)


def test_engines_of_a_node_have_names_of_their_own_and_there_are_not_too_many(node: str) -> None:
    place = meeting_place("test", node)
    listeners = [handshake.listen(place) for _ in range(MOST_ENGINES)]
    with pytest.raises(ConfigError, match="replicas: got more than 16 engines of one application on a node"):
        handshake.listen(place)
    listeners.pop(3).close()
    listeners.append(handshake.listen(place))
    assert listeners[-1].getsockname() == f"{place}-3".encode()
    for listener in listeners:
        listener.close()


def test_a_message_of_another_kind_or_with_other_descriptors_is_refused() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        handshake.send(here, Welcome(), ())
        with pytest.raises(Unavailable, match="handshake: refused: got '', expected no such key"):
            handshake.receive(there, Hello, 3)
        handshake.send(here, Welcome(), (0,))
        with pytest.raises(Unavailable, match="handshake: got 1 descriptors, expected 2"):
            handshake.receive(there, Welcome, 2)
        here.close()
        with pytest.raises(Unavailable, match="handshake: got the end of the connection, expected a message"):
            handshake.receive(there, Welcome, 2)


def test_a_request_that_never_fits_is_too_large_and_a_full_memory_is_overload(engine: FanInBatcher, node: str) -> None:
    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        with pytest.raises(TooLarge, match="rows: got 101, expected at most 100, all that may wait at once"):
            await scorer.submit(numbered(1, 101))
        held = [scorer.allocate(LAYOUT, 1000, 1), scorer.allocate(LAYOUT, 1000, 1)]
        with pytest.raises(
            Overloaded, match=r"request memory: got \d+ bytes free at this ingress, expected 12192 in one piece"
        ) as refused:
            held.extend(scorer.allocate(LAYOUT, 1000, 1) for _ in range(1000))
        assert 0 < refused.value.retry_after_s <= 60
        held.clear()
        assert rows_of(await scorer.submit(numbered(1, 100))) == numbers(1, 100)

    with_scorer(node, body)


@pytest.mark.parametrize("rows", [1, 7, 100, 1000])
def test_the_memory_holds_all_rows_that_may_be_there_whatever_the_requests(rows: int) -> None:
    """Every request has its own contexts, header, alignment and scores; 4,096 of them at the most."""
    most = min(65536 + 8192, rows * 4096)
    each = -(-(LAYOUT.offsets(rows, rows)[-1] + rows * 4) // 64) * 64
    assert most // rows * each <= memory_bytes(LAYOUT, 1, 65536 + 8192)


def test_a_peer_that_writes_nonsense_into_its_ring_is_dropped(engine: FanInBatcher, node: str) -> None:
    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        (connection,) = scorer.connections
        connection.rings.asks.put(1, 0, scorer._memory.size - 64, 100, 1, 0.0, 0.0, 0)
        connection.rings.asks.publish()
        task = asyncio.create_task(scorer.submit(numbered(1, 3)))
        with pytest.raises(Unavailable, match="engine: got its end"):
            await task
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

    with_scorer(node, body)


def test_an_ingress_whose_memory_cannot_be_locked_is_shown_out_and_the_next_one_is_let_in(
    node: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def lock_pages(memory: Any) -> None:
        asked.append(len(memory))
        if len(asked) == 1:
            raise RuntimeError("no such device")

    engine = FanInBatcher(
        FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=16, lanes=1, max_queued_rows=100, lock_pages=lock_pages
    )
    acceptor = Acceptor(meeting_place("test", node), {"m": engine})

    async def body(scorer: FanInScorer) -> None:
        await until(lambda: engine.peers == 1)  # the first time it was welcomed, and then left
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

    with_scorer(node, body)
    acceptor.check()
    acceptor.close(drain_s=0)
    for thread in engine.dispatcher.threads:
        thread.join(10)
    assert len(asked) == 2
    assert "an ingress was not let in: no such device" in caplog.text
