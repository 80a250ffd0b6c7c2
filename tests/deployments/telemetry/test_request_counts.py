from threading import Event, Thread

import pytest

from deployments.metrics import RequestSeen
from deployments.telemetry.request_counts import RequestCounts, thinned

SEEN = RequestSeen("m", "1", "ok", 100, 3900, 2, 0.1, 0.2, 0.3, 0.7)


def test_what_is_asked_twice_is_told_once() -> None:
    counts = RequestCounts(sampled=True)
    for _ in range(3):
        counts.add(SEEN)
    assert list(counts.since()) == [3, 300, 11_700, 6]
    assert counts.times(10) == [SEEN[6:10]] * 3
    assert list(counts.since()) == [0] * 4
    assert counts.times(10) == []


def test_requests_that_c_has_added_up_count_as_so_many_and_show_their_sample_alone() -> None:
    counts, times = RequestCounts(sampled=True), [(0.1, 0.2, 0.3, 0.6), (0.1, 0.2, 0.3, 0.8)]
    counts.add(SEEN._replace(requests=500, times=times))
    counts.add(SEEN._replace(total_ms=9.0, times=[]))
    assert list(counts.since()) == [501, 50_100, 501 * 3900, 1002]
    assert counts.times(10) == times


def test_scores_are_of_all_requests() -> None:
    counts = RequestCounts(sampled=True)
    for i in range(40):
        counts.add(SEEN._replace(sampled=[[i / 40]] if i % 4 == 0 else ()))
    assert counts.scores(5) == [[i / 40] for i in range(0, 40, 8)]
    assert counts.scores(5) == []


def test_what_nobody_samples_is_not_kept() -> None:
    counts = RequestCounts(sampled=False)
    counts.add(SEEN._replace(outcome="not_json"))
    assert list(counts.since()) == [1, 100, 3900, 2]
    assert counts.times(10) == []


@pytest.mark.parametrize(("some", "most", "expected"), [(0, 3, 0), (3, 3, 3), (4, 3, 2), (540, 20, 20), (5, 0, 1)])
def test_a_sample_is_even_and_of_one_at_least(some: int, most: int, expected: int) -> None:
    of = thinned(range(some), most)
    assert len(of) == expected
    assert list(of) == list(range(0, some, -(-some // max(expected, 1)) or 1))


def test_nothing_is_lost_while_it_is_asked() -> None:
    counts, over = RequestCounts(sampled=True), Event()

    def loop() -> None:
        for _ in range(20_000):
            counts.add(SEEN)
        over.set()

    thread = Thread(target=loop)
    thread.start()
    requests = kept = 0
    while not over.is_set():
        requests += next(iter(counts.since()))
        kept += len(counts.times(10**6))
    thread.join()
    assert requests + next(iter(counts.since())) == 20_000
    assert kept + len(counts.times(10**6)) == 20_000
