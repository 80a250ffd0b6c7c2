"""The listener alone, over sockets of loopback: what fits nowhere costs its own connection, and a drain cuts off no request."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.config import Limits
from deployments.direct import listener as listeners

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
        assert listener.add(accepted.fileno())
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
