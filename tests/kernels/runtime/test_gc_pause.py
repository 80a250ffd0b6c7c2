"""The collector rests, and goes on as it was."""

import gc

import pytest

from kernels.runtime.gc_pause import gc_paused


class Cycle:
    def __init__(self, ended):
        self.me, self.ended = self, ended

    def __del__(self):
        self.ended.append(True)


@pytest.mark.bulk
def test_garbage_stays_however_much_there_is():
    ended = []
    gc.collect()
    with gc_paused():
        for _ in range(20_000):  # far beyond the collector's thresholds
            Cycle(ended)
        assert not ended
    assert gc.isenabled()
    gc.collect()
    assert len(ended) == 20_000


def test_the_collector_is_as_it_was_after_an_error_and_if_it_was_off():
    with pytest.raises(ZeroDivisionError), gc_paused():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
