"""Drives the listener as hostile clients and a careless server would: python -m ..listener_fuzz SEED N

Run it with the sanitizers in the listener (see test_fuzz). What it checks itself is the form of what it is told.
"""

import os
import random
import socket
import sys

from deployments.config import Limits
from deployments.direct.listener import Listener, open_listener

READ = bytearray(1 << 20)  # one for all: to map and unmap as much for each read was most of a run with the sanitizers
BODIES = [b"", b"x", b"hello" * 40, b"y" * 3000, b"z" * 300_000]


def request(rng: random.Random, body: bytes) -> bytes:
    apart = rng.choice([b"", b"X-Request-ID: 1\r\n", b"traceparent: 00-1\r\nX-Request-ID: 2\r\n"])
    close = rng.choice([b"", b"", b"Connection: close\r\n", b"Expect: 100-continue\r\n"])
    head = b"POST /v1/score HTTP/1.1\r\nHost: a\r\n" + apart + close
    if rng.random() < 0.5:
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunks, at = b"", 0
    while at < len(body):
        size = rng.randint(1, 70_000)
        chunks += b"%x\r\n%s\r\n" % (len(body[at : at + size]), body[at : at + size])
        at += size
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def join(listener: Listener, clients: list[tuple[socket.socket, bytearray]]) -> None:
    """One client more, if the listener has room."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    if listener.add([theirs.fileno()]):
        theirs.detach()
        clients.append((ours, bytearray()))
    else:
        ours.close()
        theirs.close()


def arrive(
    rng: random.Random, listener: Listener, listening: socket.socket, clients: list[tuple[socket.socket, bytearray]]
) -> None:
    """Some clients more, as many as the listener has room for; the others are turned away."""
    for _ in range(rng.randint(1, 3)):
        ours = socket.create_connection(listening.getsockname())
        ours.setblocking(False)
        clients.append((ours, bytearray()))
    come = listener.accept(listening.fileno(), rng.randint(0, 4))
    taken = listener.add(come)
    assert 0 <= taken <= len(come) <= 4
    for fd in come[taken:]:
        os.close(fd)


def mutated(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((0, 0, 1, 3))):
        at = rng.randrange(len(out))
        match rng.randrange(4):
            case 0:
                out[at] = rng.randrange(256)
            case 1:
                del out[at : at + rng.randint(1, 9)]
            case 2:
                out[at:at] = rng.choice((b"\r\n", b"\0", b"\n", b":", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n"))
            case _:
                del out[at:]
        out = out or bytearray(b"\r")
    return bytes(out)


def main(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    listener = open_listener(Limits(max_body_bytes=200_000), 8)
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listening.setblocking(False)
    clients: list[tuple[socket.socket, bytearray]] = []
    waiting: list[int] = []
    told = answered = 0
    for step in range(steps):
        action = rng.random()
        if action < 0.1 or not clients:
            if rng.random() < 0.5:
                join(listener, clients)
            else:
                arrive(rng, listener, listening, clients)
        elif action < 0.15:
            clients.pop(rng.randrange(len(clients)))[0].close()
        elif action < 0.6:
            ours, unsent = rng.choice(clients)
            if not unsent:
                unsent += b"".join(mutated(rng, request(rng, rng.choice(BODIES))) for _ in range(rng.randint(1, 3)))
            try:
                del unsent[: ours.send(unsent[: rng.choice((1, 7, 100, 5000, 400_000))])]
            except OSError:
                ours.close()
                clients.remove((ours, unsent))
        elif action < 0.9:
            for key, head, apart, body, close, fault in listener.round():
                told += 1
                if fault is None:
                    assert head.endswith(b"\r\n")
                    assert b" HTTP/1." in head
                    assert isinstance(close, bool)
                    assert all(line.lower().startswith((b"trace", b"x-req")) for line in apart.split(b"\r\n") if line)
                    assert len(body) <= 200_000
                waiting.append(key)
        elif waiting:
            rng.shuffle(waiting)
            some, waiting = waiting[: rng.randint(1, 9)], waiting[9:]
            size = rng.choice((0, 10, 100_000, 600_000))
            listener.answer([(key, b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * size, rng.random() < 0.3) for key in some])
            listener.answer([(rng.getrandbits(64), b"nobody's", True)])
        for ours, _ in clients:
            if rng.random() < 0.3:
                try:
                    answered += bool(ours.recv_into(READ))
                except OSError:
                    continue
        if step % 5000 == 4999:
            listener.drain()
            listener.close()
            for ours, _ in clients:
                ours.close()
            clients, waiting = [], []
            listener = open_listener(Limits(max_body_bytes=200_000), 8)
    listener.close()
    print(told, answered)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
