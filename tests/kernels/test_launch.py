"""What launchers share, as far as it needs no GPU."""

import gc
import threading

import pytest

from kernels.launch import uncollected


class Cycle:
    def __init__(self, ended):
        self.me, self.ended = self, ended

    def __del__(self):
        self.ended.append(True)


def test_garbage_stays_until_a_capture_is_over_however_much_there_is():
    ended = []
    gc.collect()
    with uncollected():
        for _ in range(20_000):  # far beyond the collector's thresholds
            Cycle(ended)
        assert not ended
    assert gc.isenabled()
    gc.collect()
    assert len(ended) == 20_000


def test_the_collector_is_as_it_was_after_an_error_and_if_it_was_off():
    with pytest.raises(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_of_two_that_capture_the_first_to_end_does_not_let_the_collector_in():
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with uncollected():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    second = threading.Thread(target=lambda: seen.append(within()))

    def within():
        with uncollected():
            return gc.isenabled()

    second.start()
    leave.set()
    thread.join()
    second.join()
    assert seen == [False]
    assert gc.isenabled()
