import gc
import threading

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.fanin.request_memory import Extents, RequestMemory

SIZE = 64 * 50


class ExtentsMachine(RuleBasedStateMachine):
    """Against a map of 64-byte units: who has which."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(SIZE)
        self.taken: dict[int, int] = {}
        self.owner = [False] * (SIZE // 64)

    @rule(size=st.integers(1, 64 * 20))
    def take(self, size: int) -> None:
        units = -(-size // 64)
        text = "".join("x" if used else "." for used in self.owner)
        start = self.extents.take(size)
        assert (start is None) == ("." * units not in text)
        if start is not None:
            assert start == 64 * text.index("." * units), "the first gap that holds it"
            self.taken[start] = size
            self.owner[start // 64 : start // 64 + units] = [True] * units

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        size = self.taken.pop(start)
        self.extents.give(start, size)
        units = -(-size // 64)
        self.owner[start // 64 : start // 64 + units] = [False] * units

    @invariant()
    def the_free_bytes_are_those_that_nobody_has(self) -> None:
        assert self.extents.free_bytes == 64 * self.owner.count(False)

    def teardown(self) -> None:
        for start, size in self.taken.items():
            self.extents.give(start, size)
        assert self.extents.take(SIZE) == 0, "neighbours are one again"


TestExtents = ExtentsMachine.TestCase


def test_an_array_of_it_is_of_zeros_even_where_another_was() -> None:
    memory = RequestMemory(4096)
    first = memory.take(100)
    assert first is not None
    first.fill(7)
    del first
    second = memory.take(100)
    assert second is not None
    assert memory.offset(second) == 0
    assert not second.any()
    memory.close()


def test_bytes_are_free_again_when_the_last_view_of_them_is_gone_in_whatever_thread() -> None:
    memory = RequestMemory(4096)
    array = memory.take(4096)
    assert array is not None
    view = np.ndarray((4,), np.float32, array.data, 64)
    del array
    gc.collect()
    assert memory.take(64) is None
    held = [view]
    del view
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert memory.free_bytes == 4096
    assert memory.take(4096) is not None
    memory.close()


def test_a_full_memory_gives_nothing_and_stays_as_it_is() -> None:
    memory = RequestMemory(4096)
    kept = memory.take(4000)
    assert memory.take(200) is None
    assert memory.free_bytes == 4096 - 4032
    del kept
    memory.close()


def test_memory_of_others_has_no_offset() -> None:
    memory = RequestMemory(4096)
    assert memory.offset(np.zeros(10, np.uint8)) is None
    memory.close()


def test_threads_that_take_and_let_go_at_once_never_share_bytes() -> None:
    memory = RequestMemory(1 << 16)
    faults: list[int] = []

    def work(mark: int) -> None:
        for size in range(1, 400):
            array = memory.take(size * 7)
            if array is not None:
                array.fill(mark)
                if not (array == mark).all():
                    faults.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert memory.free_bytes == memory.size
    memory.close()
