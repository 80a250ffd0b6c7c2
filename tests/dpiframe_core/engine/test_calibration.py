"""Which program a bucket keeps, with a clock that only the programs move."""

import pytest

from dpiframe_core.engine import calibration
from dpiframe_core.engine.calibration import CALLS, ROUNDS, Calibration, calibrated


class Programs:
    """Each call of a program takes as long as its function says for the calls made of all so far, in microseconds."""

    def __init__(self, monkeypatch, **durations):
        self.seconds, self.calls = 0.0, dict.fromkeys(durations, 0)
        monkeypatch.setattr(calibration, "perf_counter", lambda: self.seconds)
        self.runs = {name: lambda name=name, of=of: self._run(name, of) for name, of in durations.items()}

    def _run(self, name, duration):
        self.seconds += duration(sum(self.calls.values())) / 1e6
        self.calls[name] += 1


def test_the_fastest_program_is_kept_and_by_how_much_is_said(monkeypatch):
    found = calibrated(64, Programs(monkeypatch, waves=lambda _: 20.0, streams=lambda _: 30.0, one=lambda _: 50.0).runs)
    assert (found.bucket, found.program) == (64, "waves")
    assert found.microseconds == {"waves": 20.0, "streams": 30.0, "one": 50.0}
    assert found.gain == pytest.approx(1.5)


def test_a_host_that_is_busy_for_some_milliseconds_does_not_decide(monkeypatch):
    """Nor do single calls that are fast or slow by chance."""
    busy = 40 * CALLS
    programs = Programs(
        monkeypatch,
        chain=lambda n: (26.0 if n < busy else 16.0) + 9.0 * (n % 7 == 0),
        waves=lambda n: (24.0 if n < busy else 18.0) - 9.0 * (n % 11 == 0),
    )
    found = calibrated(1, programs.runs)
    assert found.program == "chain"
    assert found.gain == pytest.approx(18 / 16)


def test_rounds_are_few_where_calls_are_long_and_go_over_all_programs_alike(monkeypatch):
    programs = Programs(monkeypatch, waves=lambda _: 9000.0, streams=lambda _: 8000.0)
    assert calibrated(65536, programs.runs).program == "streams"
    assert programs.calls == {"waves": ROUNDS * CALLS, "streams": ROUNDS * CALLS}


def test_a_program_alone_is_kept_without_a_call(monkeypatch):
    programs = Programs(monkeypatch, waves=lambda _: 1.0)
    found = calibrated(8, programs.runs)
    assert found == Calibration(8, "waves", {})
    assert found.gain == 1.0
    assert programs.calls == {"waves": 0}


def test_a_program_is_near_if_it_is_kept_or_15_percent_behind(monkeypatch):
    found = calibrated(64, Programs(monkeypatch, waves=lambda _: 20.0, streams=lambda _: 22.9, one=lambda _: 23.1).runs)
    assert [found.near(name) for name in ("waves", "streams", "one", "another")] == [True, True, False, False]
    assert Calibration(8, "alone", {}).near("alone")
