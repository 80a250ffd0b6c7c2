"""Which scores of a model are kept to show how they are distributed: about the same number a second, however many there are.

Knows no metrics. It is asked for every request on the event loop, so it must cost less than a microsecond.
"""

from random import random

from dpiframe_core.features.row_block import Floats

PER_SECOND = 200


class ScoreSample:
    """Every n-th row, from a random one on, so that each row of each place in a request is as likely as any other.

    n is what would have left `PER_SECOND` rows of the second before, 1 where there were fewer; or of this second so far, if
    that is more: a load that begins would have all its rows in the sample else.
    """

    def __init__(self) -> None:
        self._every = 1
        self._rows = 0
        self._since = 0.0

    def of(self, scores: Floats, now: float) -> list[list[float]]:
        """Some rows of a request's scores, float32[n, tasks]; often none. `now`: seconds of a clock that does not go back."""
        rows = len(scores)
        passed = now - self._since
        if passed >= 1:
            self._every = max(1, round(self._rows / passed / PER_SECOND))
            self._rows, self._since = 0, now
        self._rows += rows
        every = max(self._every, self._rows // PER_SECOND)
        first = int(random() * every)
        return scores[first::every].tolist() if first < rows else []
