from itertools import pairwise
from threading import Event, Thread

import pytest

from deployments.metrics import BatchSeen
from deployments.telemetry.batch_counts import BatchCounts

RUN, LOST = BatchSeen(300, 384, 3, 0.5, 1.5, failed=False), BatchSeen(20, 0, 1, 0.25, 0.0, failed=True)


def test_what_is_asked_twice_is_told_once() -> None:
    counts = BatchCounts()
    for seen in (RUN, LOST, RUN):
        counts.add(seen)
    assert list(counts.since()) == [3, 1, 3.0, 768, 168]
    assert counts.sample(10) == [0.5, 0.25, 0.5]
    assert list(counts.since()) == [0] * 5
    assert counts.sample(10) == []


@pytest.mark.parametrize("most", [1, 7, 50])
def test_a_sample_is_even_and_not_larger_than_asked_for(most: int) -> None:
    counts = BatchCounts()
    for i in range(101):
        counts.add(RUN._replace(fill=float(i)))
    fills = counts.sample(most)
    assert 0 < len(fills) <= most
    assert len({b - a for a, b in pairwise(fills)}) <= 1


def test_nothing_is_lost_while_it_is_asked() -> None:
    counts, over = BatchCounts(), Event()

    def lane() -> None:
        for _ in range(20_000):
            counts.add(RUN)
        over.set()

    thread = Thread(target=lane)
    thread.start()
    runs, fills = 0.0, 0
    while not over.is_set():
        runs += next(iter(counts.since()))
        fills += len(counts.sample(10**6))
    thread.join()
    assert runs + next(iter(counts.since())) == 20_000
    assert fills + len(counts.sample(10**6)) == 20_000
