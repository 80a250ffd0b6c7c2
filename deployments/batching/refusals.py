"""Why a request is not scored, as errors: its deadline is past, it can never fit, or too much waits. Pure, without a clock."""

from dpiframe_core.errors import DeadlineExceeded, InputError, Overloaded, TooLarge


def check_deadline(deadline: float | None, now: float, where: str) -> None:
    """Raises DeadlineExceeded if the deadline has passed."""
    if deadline is not None and deadline <= now:
        raise expired(where)


def expired(where: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"deadline: got past it {where}, expected the scores before it")


def check_room(rows: int, waiting: int, bound: int, seconds_per_row: float | None) -> None:
    """Whether `rows` more rows may wait where `waiting` do and at most `bound` may.

    Raises:
        InputError, TooLarge: they are none, or so many that they will never fit.
        Overloaded: they do not fit now.
    """
    if rows < 1:
        raise InputError("rows", rows, "at least 1")
    if rows > bound:
        raise TooLarge("rows", rows, f"at most {bound}, all that may wait at once")
    if waiting + rows > bound:
        raise queue_full(waiting, bound - rows, retry_after_s(waiting, seconds_per_row))


def queue_full(waiting: int, most: int, retry_s: float) -> Overloaded:
    """For a request before which at most `most` rows may wait. So many wait now: fewer than when it was refused, perhaps."""
    got = waiting if waiting > most else f"more than {most}"
    return Overloaded(f"queue: got {got} rows waiting, expected at most {most}", retry_s)


def retry_after_s(rows: int, seconds_per_row: float | None) -> float:
    """How long `rows` rows will take to drain, between 1 ms and 60 s; 1 s before anything was measured."""
    return 1.0 if seconds_per_row is None else min(max(rows * seconds_per_row, 0.001), 60.0)
