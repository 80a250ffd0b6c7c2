import os
import platform
from struct import Struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.fanin.board import Board
from deployments.fanin.rings import Ring, Rings
from deployments.fanin.shared_memory import require_ordered_stores, shared_memory
from dpiframe_core.errors import ConfigError

ENTRY = Struct("<Id")


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=60))
def test_what_is_put_comes_out_once_in_order_and_only_when_it_was_published(steps: list[tuple[int, bool]]) -> None:
    """A step puts some entries (as many as the ring has room for), publishes them or not, and reads."""
    memory = memoryview(bytearray(Ring.nbytes(ENTRY, 8)))
    writer, reader = Ring(memory, ENTRY, 8), Ring(memory, ENTRY, 8)
    put = published = 0
    seen: list[tuple[int, float]] = []
    for count, publish in steps:
        for _ in range(min(count, 8 - (put - len(seen)))):
            writer.put(put, put / 2)
            put += 1
        if publish:
            writer.publish()
            published = put
        seen += reader.new()
        assert seen == [(i, i / 2) for i in range(published)]


def test_a_reader_that_comes_later_sees_only_what_comes_after() -> None:
    memory = memoryview(bytearray(Ring.nbytes(ENTRY, 4)))
    writer = Ring(memory, ENTRY, 4)
    writer.put(1, 1.0)
    writer.publish()
    reader = Ring(memory, ENTRY, 4)
    assert reader.new() == []
    writer.put(2, 2.0)
    writer.publish()
    assert reader.new() == [(2, 2.0)]


def test_a_ring_of_another_size_than_a_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity: got 6, expected a power of two"):
        Ring(memoryview(bytearray(1024)), ENTRY, 6)


def test_both_sides_of_the_rings_see_what_the_other_wrote() -> None:
    fd = shared_memory("test", Rings.NBYTES)
    ingress, engine = Rings(fd), Rings(fd)
    os.close(fd)
    ingress.asks.put(1, 4095, 2**40, 100, 1, 0.5, 0.25, -10)
    ingress.asks.publish()
    assert engine.asks.new() == [(1, 4095, 2**40, 100, 1, 0.5, 0.25, -10)]
    engine.taken_rows = 2**33
    engine.answers.put(4095, 1, 0.5, 0.25, 2.0)
    engine.answers.publish()
    assert ingress.answers.new() == [(4095, 1, 0.5, 0.25, 2.0)]
    assert ingress.taken_rows == 2**33


def test_a_board_says_what_was_written_on_it() -> None:
    fd = shared_memory("test", Board.nbytes(64))
    engine, ingress = Board(fd, 64), Board(fd, 64)
    os.close(fd)
    assert (ingress.queued_rows, ingress.seconds_per_row, ingress.leaving) == (0, None, False)
    engine.write(7, 8, 0.25)
    engine.counts[64] += 3
    engine.leave()
    assert (ingress.queued_rows, ingress.inflight_rows, ingress.seconds_per_row) == (7, 8, 0.25)
    assert ingress.counts[64] == 3
    assert ingress.leaving


def test_processors_that_reorder_stores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="topology: got 'fanin' on aarch64, expected x86-64"):
        require_ordered_stores()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    require_ordered_stores()
