"""Streams of damaged requests, each cut at every byte in turn: python -m ..split_fuzz SEED REQUESTS

A listener has to say the same of a stream however it comes, so what it says of the whole one is what every cut is held against.
Run it with the sanitizers in the listener (see test_fuzz). Prints how many requests it sent, and how many were told of.
"""

import random
import socket
import sys

from deployments.config import Limits
from deployments.direct.listener import Listener, open_listener
from tests.deployments.direct.fuzz.listener_fuzz import mutated

_MOST_BODY = 1024
_LENGTHS = [
    b"0",
    b"00000000000000000005",
    b"18446744073709551616",
    b"9223372036854775807",
    b"-1",
    b"+5",
    b"5 5",
    b"0x5",
    b"",
    b"1025",
]
_LINES = [
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b" folded: 1\r\n",
    b"Authorization: Bearer x\r\n", b"Authorization: Bearer " + b"t" * 700 + b"\r\n", b"X-Request-ID: \xff\r\n", b"X: \0\r\n",
    b"Connection: close\r\n", b"Connection: ,,keep-alive,\r\n", b"Expect: 100-continue\r\n", b"Host: b\r\n", b"A: b\n",
    b"Inference-Header-Content-Length: 99999999999999999999\r\n", b"traceparent: 00-1\r\n" * 3,
]  # fmt: skip
_BODIES = [
    b"", b"hello", b'{"candidates":{"item":[1,2,3]},"context":{"user":7}}', bytes(range(256)), b"y" * 1030,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
]  # fmt: skip
_CHUNK_SIZES = [b"%x", b"0%x", b"%X;a=b", b"0000000%x", b"00000000%x", b"f%xffffff", b" %x"]

Told = list[tuple[bytes, bytes, bytes, bool, str | None]]


def request(rng: random.Random) -> bytes:
    body = rng.choice(_BODIES)
    head = rng.choice([b"POST /v2/models/demo/infer HTTP/1.1", b"GET / HTTP/1.0", b"PUT /a?b HTTP/1.1"]) + b"\r\nHost: a\r\n"
    for _ in range(rng.choice((0, 0, 1, 2))):
        head += rng.choice(_LINES)
    if rng.random() < 0.01:
        head += rng.choice((b"H: x\r\n" * 110, b"H: " + b"x" * 16_000 + b"\r\n"))
    if rng.random() < 0.6:
        length = rng.choice(_LENGTHS) if rng.random() < 0.15 else b"%d" % (len(body) + rng.choice((0,) * 12 + (1, -1)))
        return head + b"Content-Length: " + length + b"\r\n\r\n" + body
    chunks, at = b"", 0
    while at < len(body):
        part = body[at : at + rng.randint(1, 90)]
        size = _CHUNK_SIZES[0] if rng.random() < 0.8 else rng.choice(_CHUNK_SIZES)
        chunks += size % len(part) + b"\r\n" + part + b"\r\n"
        at += len(part)
    return (
        head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + rng.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX: 1\r\n\r\n"))
    )


def told_of(listener: Listener, parts: list[bytes]) -> Told:
    """All that is told of a stream that comes in these parts and then ends, each request answered as it comes."""
    ours, theirs = socket.socketpair()
    assert listener.add([theirs.fileno()]) == 1
    theirs.detach()
    told: Told = []

    def rounds() -> None:
        while found := listener.round():
            told.extend(one[1:] for one in found)
            listener.answer([(one[0], b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", one[4]) for one in found])

    try:
        for part in parts:
            ours.sendall(part)
            rounds()
    except OSError:  # it has closed, behind a fault that it told of
        pass
    ours.close()
    rounds()
    listener.round()
    assert listener.open == 0
    return told


def main(seed: int, requests: int) -> None:
    rng = random.Random(seed)
    listener = open_listener(Limits(max_body_bytes=_MOST_BODY), 4)
    sent = told = 0
    while sent < requests:
        count = rng.randint(1, 4)
        stream = b"".join(mutated(rng, request(rng)) for _ in range(count))
        whole = told_of(listener, [stream])
        cuts = range(1, len(stream)) if len(stream) < 2000 else rng.sample(range(1, len(stream)), 100)
        for cut in cuts:
            again = told_of(listener, [stream[:cut], stream[cut:]])
            assert again == whole, (stream, cut, whole, again)
        some = sorted(rng.sample(range(1, len(stream)), min(len(stream) - 1, rng.randint(2, 40))))
        pieces = [stream[a:b] for a, b in zip([0, *some], [*some, len(stream)], strict=True)]
        assert told_of(listener, pieces) == whole, (stream, some)
        sent += count * (len(cuts) + 2)
        told += len(whole) * (len(cuts) + 2)
    listener.close()
    print(sent, told)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
