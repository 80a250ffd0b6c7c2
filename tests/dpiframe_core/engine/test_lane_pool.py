"""The pool itself, with lanes that do nothing."""

import threading
import time

import pytest

from dpiframe_core.engine.lane_pool import LanePool
from dpiframe_core.errors import Unavailable


class Lane:
    """Stands for a lane: a pool only hands it about."""


def test_of_several_that_close_at_once_one_gets_every_lane_and_all_return():
    for _ in range(5):
        lanes = [Lane(), Lane(), Lane()]
        pool, got = LanePool(lanes), []
        taken = [pool.take(None, 0) for _ in lanes]
        closers = [
            threading.Thread(target=lambda pool=pool, got=got: got.append(list(pool.drain())), daemon=True) for _ in range(3)
        ]
        for t in closers:
            t.start()
        for lane in taken:
            time.sleep(0.01)  # all wait: the lane wakes them, and each is free to take it
            pool.put(lane)
        for t in closers:
            t.join(60)
        assert not any(t.is_alive() for t in closers)
        assert sorted(map(len, got)) == [0, 0, 3]
        assert pool.lanes == ()


def test_a_drained_pool_gives_nothing():
    pool = LanePool([Lane()])
    pool.drain()
    with pytest.raises(Unavailable, match="engine: closed"):
        pool.take(None, 0)


def test_a_pool_is_crowded_while_more_than_one_lane_is_taken():
    pool = LanePool([Lane(), Lane(), Lane()])
    first = pool.take(None, 0)
    assert not pool.crowded
    pool.take(None, 0)
    assert pool.crowded
    pool.put(first)
    assert not pool.crowded
