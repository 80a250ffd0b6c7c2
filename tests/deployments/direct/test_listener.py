"""The listener alone, over sockets of loopback: what fits nowhere costs its own connection, and a drain cuts off no request."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.config import Limits
from deployments.direct import listener as listeners
from deployments.host_sockets.listening import Port

HEAD = b"POST /v1/score HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def connected() -> Iterator[tuple[Any, Callable[[], socket.socket]]]:
    """A listener, and what connects a client to it."""
    listener = listeners.open_listener(Limits())
    clients = []

    def client() -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            clients.append(socket.create_connection(server.getsockname()))
            accepted, _ = server.accept()
        accepted.setblocking(False)
        assert listener.add([accepted.fileno()]) == 1
        accepted.detach()
        return clients[-1]

    yield listener, client
    listener.close()
    for one in clients:
        one.close()


def told(listener: Any, requests: int) -> list[listeners.Received]:
    """What rounds tell until there are so many requests."""
    found: list[listeners.Received] = []
    give_up = time.monotonic() + 10
    while len(found) < requests:
        assert time.monotonic() < give_up
        found += [listeners.Received(*fields) for fields in listener.round()]
    return found


def test_heads_that_announce_large_bodies_leave_room_for_others(connected: Any) -> None:
    listener, client = connected
    for _ in range(100):
        client().sendall(HEAD % Limits().max_body_bytes)
    for _ in range(20):
        assert listener.round() == []
    slow = client()
    slow.sendall(HEAD % 4)
    listener.round()
    slow.sendall(b"body")
    (request,) = told(listener, 1)
    assert (request.body, request.fault) == (b"body", None)


def test_a_drain_closes_a_connection_whose_request_came_in_two_reads(connected: Any) -> None:
    listener, client = connected
    one = client()
    one.sendall(HEAD % 4)
    assert listener.round() == []
    one.sendall(b"body")
    (request,) = told(listener, 1)
    listener.answer([(request.key, EMPTY, False)])
    assert one.recv(len(EMPTY)) == EMPTY
    listener.round()
    listener.drain()
    assert (listener.open, one.recv(1)) == (0, b"")


def test_a_drain_answers_what_was_sent_before_it_however_many_there_are(connected: Any) -> None:
    listener, client = connected
    clients = [client() for _ in range(400)]  # a round sees 256 of them
    for one in clients:
        one.sendall(HEAD % 2 + b"ok")
    listener.drain()
    requests = told(listener, 400)
    listener.answer([(request.key, EMPTY, True) for request in requests])
    assert {one.recv(len(EMPTY)) for one in clients} == {EMPTY}


def sent_until_full(client: socket.socket, data: bytes) -> int:
    client.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < len(data):
            sent += client.send(data[sent:])
    client.settimeout(10)
    return sent


CHUNKED = b"POST /v1/score HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def test_a_client_that_sends_faster_than_it_is_read_has_no_round_for_itself(connected: Any) -> None:
    listener, client = connected
    fast, theirs = socket.socketpair()
    with fast:
        fast.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        theirs.setblocking(False)
        assert listener.add([theirs.detach()]) == 1
        sent = sent_until_full(fast, CHUNKED + b"1\r\nx\r\n" * 400_000)
        if sent < 1 << 20:
            pytest.skip(f"a socket keeps {sent} bytes here")
        client().sendall(HEAD % 0)
        assert len(listener.round()) == 1
        assert listener.due == 1  # there is more of it, for the next rounds
        while listener.due:
            assert listener.round() == []
        fast.sendall(b"none")
        (request,) = told(listener, 1)
        assert request.fault is not None
        assert request.fault.startswith("400 a chunk ")


def test_who_sends_on_behind_its_last_answer_has_no_round_for_itself(connected: Any) -> None:
    listener, client = connected
    fast = client()
    fast.sendall(b"none\r\n")
    (request,) = told(listener, 1)
    assert sent_until_full(fast, bytes(4 << 20)) > 2**16
    assert listener.answer([(request.key, EMPTY, True)])  # more waits
    while listener.due:
        listener.round()
    assert fast.recv(100) == EMPTY


def test_extensions_of_chunks_are_few(connected: Any) -> None:
    listener, client = connected
    one, other = client(), client()
    one.sendall(CHUNKED + b"1;%s\r\nx\r\n" % (b"a" * 200) * 81 + b"0\r\n\r\n")
    other.sendall(CHUNKED + b"1;%s\r\nx\r\n" % (b"a" * 200) * 82 + b"0\r\n\r\n")
    assert {(len(request.body), request.fault) for request in told(listener, 2)} == {
        (81, None), (0, "400 a chunk with a broken extension")
    }  # fmt: skip


def test_requests_behind_a_large_answer_come_in_their_order(connected: Any) -> None:
    listener, client = connected
    one = client()
    one.sendall(HEAD % 2 + b"1." + HEAD % 2 + b"2.")
    (first,) = told(listener, 1)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (20 << 20) + bytes(20 << 20)
    listener.answer([(first.key, answer, False)])
    one.sendall(HEAD % 2 + b"3.")
    left, then = len(answer), []
    one.settimeout(10)
    while left:
        left -= len(one.recv(1 << 20))
        then += [listeners.Received(*fields) for fields in listener.round()]
    then += told(listener, 1 - len(then))
    listener.answer([(then[0].key, EMPTY, False)])
    then += told(listener, 1)
    assert [(request.body, request.fault) for request in then] == [(b"2.", None), (b"3.", None)]


def test_clients_that_wait_are_accepted_so_many_at_a_time_and_have_what_a_connection_needs() -> None:
    listener = listeners.open_listener(Limits())
    with Port("127.0.0.1", 0).listen() as listening, contextlib.ExitStack() as clients:
        listening.setblocking(False)
        for _ in range(5):
            clients.enter_context(socket.create_connection(listening.getsockname()))
        rounds = [listener.accept(listening.fileno(), 3) for _ in range(3)]
        assert list(map(len, rounds)) == [3, 2, 0]
        for fd in rounds[0] + rounds[1]:
            assert not os.get_blocking(fd)
            assert not os.get_inheritable(fd)
            with socket.socket(fileno=fd) as accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        closed = listening.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        listener.accept(closed, 3)
    listener.close()


def test_a_listener_takes_as_many_as_may_be_and_leaves_the_others_to_who_asks() -> None:
    listener = listeners.open_listener(Limits(), 3)
    with contextlib.ExitStack() as stack:
        ours, theirs = zip(*(socket.socketpair() for _ in range(5)), strict=True)
        for one in (*ours, *theirs):
            one.setblocking(False)
            stack.enter_context(one)
        assert listener.add([one.fileno() for one in theirs]) == 3
        assert listener.add([theirs[3].fileno()]) == 0
        for one in theirs[:3]:
            one.detach()
        for i, one in enumerate(ours):
            one.sendall(HEAD % 1 + b"%d" % i)
        assert {request.body for request in told(listener, 3)} == {b"0", b"1", b"2"}
        ours[0].close()
        listener.round()
        assert listener.add([one.fileno() for one in theirs[3:]]) == 1
        theirs[3].detach()
        with pytest.raises(TypeError):
            listener.add(["3"])
        listener.drain()
        assert listener.add([theirs[4].fileno()]) == 0
        listener.close()
