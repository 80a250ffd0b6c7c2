"""An engine and its door in one process: who is let in, and within which bounds."""

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

from deployments.config import MOST_ENGINES
from deployments.fanin import handshake
from deployments.fanin.acceptor import Doorkeeper
from deployments.fanin.batcher import FanInEngine
from deployments.fanin.handshake import Hello, Welcome, meeting_place
from deployments.fanin.rings import Channel, shared_memory
from deployments.fanin.scorer import FanInScorer, slab_bytes
from dpiframe_core.errors import ConfigError, Overloaded, TooLarge, Unavailable
from tests.deployments.fanin.doubles import FINGERPRINT, rows_of, with_scorer
from tests.deployments.serving_doubles import LAYOUT, FakeDevice, numbered, numbers, until


@pytest.fixture
def node(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()}-{request.node.name}"


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
        with handshake.connect(place, 0) as stranger:
            stranger.send(said) if said else stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    hello = Hello(model="m", fingerprint=FINGERPRINT, slab_bytes=4096)
    for fds in ((), (0,), (0, 0, 0)):  # none, too few, and what is no shared memory
        with handshake.connect(place, 0) as stranger:
            handshake.send(stranger, hello, fds)
            assert stranger.recv(100) == b""
    shared = shared_memory("test", 4096), shared_memory("test", Channel.NBYTES), os.eventfd(0)
    for size in (-1, 0, 4097, 2**47, 2**48, 2**63, 2**100):
        with handshake.connect(place, 0) as stranger:
            handshake.send(stranger, hello.model_copy(update={"slab_bytes": size}), shared)
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
    from deployments.serve.engine_replica import EngineReplica

    keeper = Doorkeeper(meeting_place("test", node), {})
    replica: Any = SimpleNamespace(_engines=[], _door=keeper)
    EngineReplica.check_health(replica)
    with monkeypatch.context() as broken:
        broken.setattr(keeper, "_thread", threading.Thread())
        with pytest.raises(Unavailable, match="door: got the end of its thread, expected it to run until it is closed"):
            EngineReplica.check_health(replica)
    keeper.close(0)
    EngineReplica.check_health(replica)


def test_an_engine_asks_ingresses_to_leave_only_when_they_cannot_come_back(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FanInEngine(FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=16, lanes=1, max_queued_rows=100)
    place = meeting_place("test", node)
    keeper = Doorkeeper(place, {"m": engine})
    left = []

    def leave() -> None:
        with pytest.raises(ConnectionRefusedError):
            handshake.connect(place, 0)
        left.append(True)

    monkeypatch.setattr(engine.board, "leave", leave)
    keeper.close(0)
    assert left == [True]


def test_a_process_of_another_user_is_refused(engine: FanInEngine, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, uid = meeting_place("test", node), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(Unavailable, match=f"door: got a process of user {uid}, expected one of user {uid + 1}"):
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
        with pytest.raises(Unavailable, match="door: model: got nothing, expected a value"):
            handshake.receive(there, Hello, 3)
        handshake.send(here, Welcome(), (0,))
        with pytest.raises(Unavailable, match="door: got 1 descriptors, expected 2"):
            handshake.receive(there, Welcome, 2)
        here.close()
        with pytest.raises(Unavailable, match="door: got the end of the connection, expected a message"):
            handshake.receive(there, Welcome, 2)


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
