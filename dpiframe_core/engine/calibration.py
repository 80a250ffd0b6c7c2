"""Which program each bucket runs, by measurement: streams help where branches are unequal and small, waves where launches rule,
and the largest products are fastest in a library's own kernels. Plain data, shared by an engine's lanes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

_NEAR = 1.15
ROUNDS, CALLS, SECONDS = 5, 5, 0.03  # at least so many rounds, and for so long, a bucket


@dataclass(frozen=True, slots=True)
class Calibration:
    """What warm-up found for one bucket: the program kept, and microseconds of each, launched and waited for (least median)."""

    bucket: int
    program: str
    microseconds: Mapping[str, float]

    @property
    def gain(self) -> float:
        """How many times faster the kept program is than the next best; 1 if there was no choice."""
        times = sorted(self.microseconds.values())
        return times[1] / times[0] if len(times) > 1 else 1.0

    def near(self, program: str) -> bool:
        """Whether a program is kept, or so little behind that faster ways for its layers might decide."""
        return (
            program == self.program or self.microseconds.get(program, float("inf")) <= _NEAR * self.microseconds[self.program]
        )


def calibrated(bucket: int, runs: Mapping[str, Callable[[], object]]) -> Calibration:
    """Times calls that launch a program and wait for it. Rounds go over all in turn: a rising clock favours none. What is found
    stays for every start to come, and programs differ by as little as half a microsecond, less than a busy host does over the
    2 ms of five rounds: so rounds go on for a while, and each program's quietest one counts.
    """
    if len(runs) == 1:
        return Calibration(bucket, next(iter(runs)), {})
    best = dict.fromkeys(runs, float("inf"))
    begin, rounds = perf_counter(), 0
    while rounds < ROUNDS or perf_counter() - begin < SECONDS:
        rounds += 1
        for name, run in runs.items():
            times = []
            for _ in range(CALLS):
                start = perf_counter()
                run()
                times.append(perf_counter() - start)
            best[name] = min(best[name], sorted(times)[CALLS // 2] * 1e6)
    return Calibration(bucket, min(best, key=lambda name: best[name]), {n: round(t, 1) for n, t in best.items()})
