"""What the listener takes for a request is what h11 and httptools, of other people, take for it: else one could be smuggled."""

import contextlib
import random
import socket
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import h11
import httptools
import pytest

from deployments.config import Limits
from deployments.direct.listener import Received, open_listener

EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
BEHIND = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"  # is it a request of its own, or a part of the one before?
LINES = [
    b"POST /v1/score HTTP/1.1\r\n",
    b"GET /a%00?x=#y HTTP/1.1\r\n",
    b"GET // HTTP/1.1\r\n",
    b"POST /x HTTP/1.0\r\n",
    b"POST  /x HTTP/1.1\r\n",
    b"POST /x\tHTTP/1.1\r\n",
    b"POST /x HTTP/1.1 \r\n",
    b"POST /x HTTP/1.2\r\n",
    b"OPTIONS * HTTP/1.1\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n",
]
FRAMES = [
    b"Content-Length: 11\r\n",
    b"Transfer-Encoding: chunked\r\n",
    *(b"Content-Length:" + value + b"\r\n" for value in (
        b"011", b" 11 ", b"\t11", b" +11", b" 0x0b", b" 1 1", b" 11,11", b" 11;", b" -1", b" 5", b"", b" 11\x0b",
    )),
    *(b"Transfer-Encoding:" + value + b"\r\n" for value in (
        b" Chunked", b"\tchunked ", b" identity", b" xchunked", b" chunked, identity", b" gzip, chunked", b" ,chunked",
        b" chunked, chunked", b' "chunked"', b" chunked;q=1", b" \x0bchunked", b"",
    )),
    b"Content-Length : 11\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b" Transfer-Encoding: chunked\r\n",
    b"X: y\r\n Transfer-Encoding: chunked\r\n",
    b"X: y\nTransfer-Encoding: chunked\r\n",
    b"X: y\rTransfer-Encoding: chunked\r\n",
    b"X\0: y\r\n",
    b"Transfer_Encoding: chunked\r\n",
]  # fmt: skip
OTHERS = [b"", b"X: \xff\xfe\r\n", b"X:\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Host: b\r\n"]
BODIES = [
    b"hello world",
    b"b\r\nhello world\r\n0\r\n\r\n",
    b"b;x=y\r\nhello world\r\n0\r\n\r\n",
    b'B;x="a"\r\nhello world\r\n0;z\r\n\r\n',
    b'b;x="a\r\n"\r\nhello world\r\n0\r\n\r\n',
    b"5\r\nhello\r\n6\r\n world\r\n00000000\r\n\r\n",
    b"b\r\nhello world\r\n0\r\nX: y\r\n\r\n",
    b"b\nhello world\n0\n\n",
    b"b \r\nhello world\r\n0\r\n\r\n",
    b"b;\nxx\r\nhello world\r\n0\r\n\r\n",
    b"b\r\nhello world0\r\n\r\n",
    b"0xb\r\nhello world\r\n0\r\n\r\n",
    b"100000000b\r\nhello world\r\n0\r\n\r\n",
    b"b\r\nhello world\r\n0\r\n",
    b"-b\r\n",
]


class Request(NamedTuple):
    method: bytes
    target: bytes
    body: bytes


def of_the_listener(stream: bytes) -> list[Request]:
    """All that it tells, each answered, until it refuses one or has none."""
    listener, found = open_listener(Limits(), 1), []
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    assert listener.add([theirs.fileno()]) == 1
    theirs.detach()
    ours.sendall(stream)
    while told := listener.round():
        (request,) = (Received(*fields) for fields in told)
        if request.fault is None:
            method, target, _ = request.head.split(b"\r\n")[0].split(b" ")
            found.append(Request(method, target, request.body))
        listener.answer([(request.key, EMPTY, request.close)])
    listener.close()
    ours.close()
    return found


def of_h11(stream: bytes) -> list[Request]:
    connection, found = h11.Connection(h11.SERVER), list[Request]()
    connection.receive_data(stream)
    try:
        while connection.their_state is not h11.MUST_CLOSE:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request = Request(event.method, event.target, b"")
            elif isinstance(event, h11.Data):
                request = request._replace(body=request.body + event.data)
            elif isinstance(event, h11.EndOfMessage) and request.method != b"CONNECT":
                found.append(request)
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.DONE and connection.their_state is h11.DONE:
                    connection.start_next_cycle()
            else:
                break
    except h11.RemoteProtocolError:
        pass
    return found


def of_httptools(stream: bytes) -> list[Request]:
    found = list[Request]()

    class Told:
        def on_message_begin(self) -> None:
            self.target = self.body = b""

        def on_url(self, part: bytes) -> None:
            self.target += part

        def on_body(self, part: bytes) -> None:
            self.body += part

        def on_message_complete(self) -> None:
            found.append(Request(parser.get_method(), self.target, self.body))

    parser = httptools.HttpRequestParser(Told())
    with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        parser.feed_data(stream)
    return found


def request(rng: random.Random) -> bytes:
    """One of a length or of chunks, as it should be but for at most two parts."""
    length = rng.random() < 0.5
    parts = [LINES[0], FRAMES[0] if length else FRAMES[1], b"", b"\r\n", BODIES[0] if length else BODIES[1]]
    for part in rng.sample(range(5), rng.choice((0, 1, 1, 2))):
        parts[part] = rng.choice((LINES, FRAMES, [*OTHERS, *FRAMES], [b"\r\n", b"\n"], BODIES)[part])
    line, frame, other, *rest = parts
    return b"".join([line, *rng.sample([b"Host: a\r\n", frame, other], 3), *rest])


@pytest.mark.parametrize("reader", [of_h11, of_httptools])
def test_who_reads_what_the_listener_takes_finds_the_same_requests(reader: Callable[[bytes], list[Request]]) -> None:
    rng, taken = random.Random(7), Counter[int]()
    for _ in range(1000):
        stream = request(rng) + request(rng) + BEHIND
        ours = of_the_listener(stream)
        assert reader(stream)[: len(ours)] == ours, stream
        taken[len(ours)] += 1
    assert min(taken[n] for n in range(4)) > 20, taken
