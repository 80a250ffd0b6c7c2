import pytest

from deployments.batching.device_load import DeviceLoad
from deployments.batching.refusals import retry_after_s


def test_the_drain_rate_counts_busy_time_only() -> None:
    load = DeviceLoad()
    assert retry_after_s(1000, load.seconds_per_row) == 1.0
    for start in (0.0, 100.0, 200.0):  # 50 rows in half a second, then idle for long
        load.started(50, start)
        load.finished(50, start + 0.5)
    assert retry_after_s(1000, load.seconds_per_row) == pytest.approx(10.0)
    assert retry_after_s(0, load.seconds_per_row) == 0.001
    assert retry_after_s(10**9, load.seconds_per_row) == 60.0


def test_lanes_that_finish_together_count_as_one_stretch_of_time() -> None:
    load = DeviceLoad()
    for start in (0.0, 1.0, 2.0):
        load.started(50, start)
        load.started(50, start)
        load.finished(50, start + 1)
        load.finished(50, start + 1)
    assert retry_after_s(100, load.seconds_per_row) == pytest.approx(1.0, rel=0.2)


def test_the_device_is_busy_from_its_first_batch_to_its_last_however_many_there_are_at_once() -> None:
    load = DeviceLoad()
    load.started(7, 10.0)
    load.started(5, 11.0)
    assert (load.batches, load.rows, load.busy_s(12.0)) == (2, 12, 2.0)
    load.finished(7, 13.0)
    load.finished(5, 14.0)
    assert (load.batches, load.rows, load.busy_s(20.0)) == (0, 0, 4.0)
    load.started(1, 30.0)
    assert load.busy_s(31.0) == 5.0
