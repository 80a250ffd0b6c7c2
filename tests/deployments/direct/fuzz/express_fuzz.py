"""Drives what C answers from end to end, as hostile clients and a broken engine would: python -m ..express_fuzz SEED N

Run it with the sanitizers in the listener (see test_fuzz). It checks itself that blocks are sound and, where nothing is damaged
on its way (an even seed), hold what was sent, whatever requests were asked for together.
"""

import os
import random
import socket
import sys
import time
from array import array
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from deployments.config import Limits
from deployments.direct.listener import Listener, open_listener, open_ring
from deployments.fanin.board import Board
from deployments.fanin.request_memory import RequestMemory
from deployments.fanin.rings import Ask, Rings
from deployments.fanin.shared_memory import shared_memory
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.row_block import RowBlock
from tests.deployments.direct.fuzz.listener_fuzz import READ, join, mutated
from tests.deployments.direct.test_express import body, post
from tests.deployments.serving_doubles import SCHEMA

_SLOT_BYTES, _SLOTS = 4096, 8
_SHAPES = [{"rows": 1}, {"rows": 3}, {"rows": 3, "deadline_ms": 1}, {"rows": 20, "priority": 1}, {"rows": 60}]
_TIMES = [1.0, 1.0, 1.0, 0.0, -1.0, 3e38, float("nan"), float("inf")]
_ROWS = [float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 9.3e18]
READER, LAYOUT = PreencodedReader(SCHEMA), SCHEMA.block_layout


class Engine:
    """The other end of a ring, which answers in any order, twice, to nobody, and nonsense; but to each at last."""

    def __init__(self, rng: random.Random, trusting: bool) -> None:
        self.rng, self.trusting = rng, trusting
        self.memory, rings_fd = RequestMemory(_SLOTS * _SLOT_BYTES), shared_memory("fuzz", Rings.NBYTES)
        self.fds = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        self.board = board = Board(shared_memory("fuzz", Board.nbytes(1)), 1)
        begun = Rings(rings_fd)  # both rings begin anew within the first requests
        begun.asks._published[0], begun.answers._published[0] = (entries - 9 for entries in Rings.ENTRIES)
        self.rings, beside = Rings(rings_fd), Rings(shared_memory("fuzz", Rings.NBYTES))
        agreed: Any = SimpleNamespace(
            rings=Rings(rings_fd),
            board=board,
            welcome=SimpleNamespace(max_queued_rows=400, max_batch_rows=64),
            answer_fd=self.fds[0],
            wake_fd=self.fds[1],
        )
        self.ring = open_ring(agreed, beside, self.memory, _SLOT_BYTES)
        self.open: list[tuple[int, int, int]] = []
        self.taken = 0

    def take_in(self) -> None:
        for kind, slot, at, rows, contexts, _, _, _ in self.rings.asks.new():
            if kind == Ask.CANCEL:
                continue
            block = RowBlock.from_bytes(bytes(self.memory.mapped)[at : at + LAYOUT.offsets(rows, contexts)[-1]], LAYOUT)
            assert (block.rows, block.contexts) == (rows, contexts)
            items, users = block.wide_ids("candidate_ids"), block.wide_ids("context_ids")
            requests = np.searchsorted(block.request_of_row, np.arange(contexts + 1))
            for context, (start, stop) in enumerate(pairwise(requests.tolist())):
                first = int(items[start, 0])
                assert 0 <= first < 1000
                assert not self.trusting or (users[context, 0], items[start:stop, 0].tolist()) == (
                    7,
                    [*range(first, first + stop - start)],
                )
            self.taken += rows
            self.open.append((slot, rows, at + block.places[-1]))
        self.rings.taken_rows = self.taken

    def answer(self) -> None:
        self.rng.shuffle(self.open)
        for slot, rows, at in [self.open.pop() for _ in range(self.rng.randint(0, len(self.open)))]:
            values = float("nan") if self.rng.random() < 0.05 else 0.5
            self.memory.mapped[at : at + 4 * rows] = np.full(rows, values, np.float32).tobytes()
            times = self.rng.choices(_TIMES, k=3) if not self.trusting else (1.0, 2.0, 0.1)
            self.rings.answers.put(slot, self.rng.choice((1,) * 30 + (2, 3, 4, 5, 77)), *times)
        if self.rng.random() < 0.1:
            self.rings.answers.put(self.rng.getrandbits(32), 1, float("nan"), 1e30, 0.0)
        self.rings.answers.publish()
        os.eventfd_write(self.fds[0], 1)
        if not self.trusting:  # what its board and its counts say, now and then
            said = self.rng.choice(_ROWS) if self.rng.random() < 0.05 else 0.0
            self.board.line.cast("d")[:2] = array("d", (said, said))
            self.rings.taken_rows = self.rng.choice((0, 2**63, 2**64 - 1)) if self.rng.random() < 0.05 else self.taken

    def close(self, listener: Any) -> None:
        listener.detach(self.ring)
        for fd in self.fds:
            os.close(fd)
        self.memory.close()


def learn(listener: Any, rings: list[Any], sent: bytes, shape: dict[str, Any]) -> None:
    head, _, content = sent.partition(b"\r\n\r\n")
    whole, length = body(**shape)
    rows, size = shape["rows"], len(whole) - length
    dense, ids = size - 8 * rows, size - 8 * rows - 40 * rows
    plan = READER.plan({
        "context_ids": ((1, 1), np.dtype(np.int32), ids), "candidate_ids": ((rows, 5), np.dtype(np.int64), dense),
        "candidate_dense": ((rows, 2), np.dtype(np.float32), size),
    })  # fmt: skip
    block = RowBlock.allocate(LAYOUT, rows)
    how = rows, 1, 1, shape.get("priority", 0), shape.get("deadline_ms", 0) / 1e3
    text = b"HTTP/1.1 200 OK\r\n", b"content-type: x\r\n", b"{", b"}"
    header = block.buffer[:64].tobytes(), LAYOUT.widths
    listener.learn(head + b"\r\n", content[:length], len(content), shape["rows"], rings, how, header, *READER.told(plan), text)


def count(listener: Listener, *, made_up: bool = False) -> tuple[int, int]:
    """Requests that were answered, and that their clients gave up. `made_up`: their engine has said so without scoring them."""
    tallies, samples = listener.seen()
    for known, times, scores in samples:
        assert known in (1, 3, 20, 60)
        assert ((np.frombuffer(times) >= 0) & (np.frombuffer(times) < 1e13)).all()
        assert made_up or set(np.frombuffer(scores, np.float32)) <= {np.float32(0.5)}
    requests = np.zeros(2)
    for known, tally in tallies:
        assert known in (1, 3, 20, 60)
        sums = np.frombuffer(tally).reshape(-1, 5)
        assert ((sums >= 0) & (sums <= 1e13 * sums[:, :1])).all()
        requests += sums[:-1, 0].sum(), sums[-1, 0]
    assert sum(map(bool, (times for _, times, _ in samples))) <= requests[0]
    return int(requests[0]), int(requests[1])


def main(seed: int, steps: int) -> None:
    rng, trusting = random.Random(seed), seed % 2 == 0  # then nothing is damaged on its way
    listener = open_listener(Limits(max_body_bytes=200_000), 32)
    listener.date(b"date: now\r\n")
    engine, rings = Engine(rng, trusting), []
    assert listener.attach(engine.ring)
    rings.append(engine.ring)
    clients: list[tuple[socket.socket, bytearray]] = []
    answered = ended = cancelled = told = 0
    for step in range(steps):
        action = rng.random()
        if step % 500 == 0:
            listener.forget()
            for shape in _SHAPES:
                learn(listener, rings, post(**shape), shape)
        if action < 0.1 or not clients:
            join(listener, clients)
        elif action < 0.13:
            clients.pop(rng.randrange(len(clients)))[0].close()
        elif action < 0.6:
            ours, unsent = rng.choice(clients)
            if not unsent:
                for _ in range(rng.randint(1, 4)):
                    whole = post(**rng.choice(_SHAPES), first=rng.randint(0, 1000))
                    unsent += mutated(rng, whole) if rng.random() < 0.1 and not trusting else whole
            try:
                del unsent[: ours.send(unsent[: rng.choice((100, 5000, 400_000, 400_000))])]
            except OSError:
                ours.close()
                clients.remove((ours, unsent))
        elif action < 0.9:
            keys = [fields[0] for fields in listener.round()]
            told += len(keys)
            listener.answer([(key, b"HTTP/1.1 400 No\r\n\r\n", True) for key in keys])
            gone = listener.ended()
            ended += len(gone)
            listener.answer([(one[0], b"HTTP/1.1 503 No\r\n\r\n", False) for one in gone])
            counted = count(listener)
            answered, cancelled = answered + counted[0], cancelled + counted[1]
        elif action < 0.99:
            engine.take_in()
            engine.answer()
        else:
            rings.clear()
            engine.close(listener)
            engine = Engine(rng, trusting)
            assert listener.attach(engine.ring)
            rings.append(engine.ring)
        for ours, _ in clients:
            if rng.random() < 0.3:
                try:
                    ours.recv_into(READ)
                except OSError:
                    continue
        if step % 97 == 0:
            time.sleep(0.001)  # deadlines
    engine.rings.answers._published[0] = 2**63  # as many answers, it says: they are not looked for one by one
    os.eventfd_write(engine.fds[0], 1)
    listener.round()
    listener.close()
    cancelled += count(listener, made_up=True)[1]
    engine.close(listener)
    print(answered, ended, cancelled, told)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
