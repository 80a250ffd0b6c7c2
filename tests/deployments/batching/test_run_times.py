import math

from hypothesis import given
from hypothesis import strategies as st

from deployments.batching.run_times import RunTimes

LIMIT = 200e-6


def test_nothing_is_expected_to_be_short_before_a_run() -> None:
    assert RunTimes(4096).expected(1) == RunTimes(4096).expected(4096) == math.inf


def test_a_run_bounds_those_of_fewer_rows_and_in_proportion_those_of_more() -> None:
    times = RunTimes(4096)
    times.ran_elsewhere(100, 40e-6, 30e-6)
    assert [times.expected(rows) for rows in (1, 64, 127)] == [40e-6] * 3
    assert [times.expected(rows) for rows in (128, 256, 4096)] == [80e-6, 160e-6, 64 * 40e-6]


def test_one_interrupted_run_costs_at_most_a_few_hand_overs_and_a_slow_device_is_noticed() -> None:
    times = RunTimes(4096)
    times.ran_here(100, 30e-6)
    times.ran_here(100, 5e-3)
    assert times.expected(100) == 120e-6
    times.ran_here(100, 30e-6)
    assert times.expected(100) == 30e-6
    for _ in range(2):
        times.ran_here(100, 5e-3)
    assert times.expected(100) > LIMIT
    times.ran_elsewhere(100, 40e-6, 30e-6)
    assert times.expected(100) <= 40e-6


def test_runs_that_waited_for_the_interpreter_do_not_raise_what_is_expected() -> None:
    times = RunTimes(4096)
    times.ran_here(100, 30e-6)
    for _ in range(10):
        times.ran_elsewhere(100, 1e-3, 20e-6)
    assert times.expected(100) <= 30e-6


def test_what_was_long_for_waiting_alone_is_tried_here_again_and_what_was_long_for_computing_is_not() -> None:
    waited, computed = RunTimes(4096), RunTimes(4096)
    for _ in range(300):
        waited.ran_elsewhere(100, 5e-3, 50e-6)
        computed.ran_elsewhere(100, 500e-6, 480e-6)
    assert waited.expected(100) <= LIMIT
    assert computed.expected(100) == 480e-6


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4096), st.floats(0, 10), st.floats(0, 10)), min_size=1))
def test_an_expectation_is_never_above_what_was_seen_last(runs: list[tuple[bool, int, float, float]]) -> None:
    times = RunTimes(4096)
    for here, rows, seconds, cpu_seconds in runs:
        if here:
            times.ran_here(rows, seconds)
        else:
            times.ran_elsewhere(rows, seconds, cpu_seconds)
        assert 0 <= times.expected(rows) <= seconds
