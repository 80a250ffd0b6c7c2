from hypothesis import given
from hypothesis import strategies as st

from deployments.batching.row_queue import RowQueue, Ticket


def ticket(name: str, rows: int, priority: int = 0, deadline: float | None = None) -> Ticket[str]:
    return Ticket(name, rows, deadline, priority, arrived=0.0)


def formed(queue: RowQueue[str], now: float = 0.0) -> list[tuple[str, int, int]]:
    return [(part.ticket.item, part.start, part.stop) for part in queue.form(now)[0]]


def test_a_batch_takes_all_that_waits_in_order_of_arrival() -> None:
    queue: RowQueue[str] = RowQueue(100)
    for name in "abc":
        queue.push(ticket(name, 10))
    assert queue.rows == 30
    assert formed(queue) == [("a", 0, 10), ("b", 0, 10), ("c", 0, 10)]
    assert queue.rows == 0
    assert formed(queue) == []


def test_higher_priority_goes_first_and_equals_keep_their_order() -> None:
    queue: RowQueue[str] = RowQueue(100)
    for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 0), ("e", 5)):
        queue.push(ticket(name, 1, priority))
    assert [name for name, _, _ in formed(queue)] == ["c", "e", "a", "d", "b"]


def test_a_request_that_does_not_fit_fills_the_batch_and_keeps_its_place() -> None:
    queue: RowQueue[str] = RowQueue(10)
    for name in "abc":
        queue.push(ticket(name, 7))
    assert formed(queue) == [("a", 0, 7), ("b", 0, 3)]
    assert formed(queue) == [("b", 3, 7), ("c", 0, 6)]
    assert formed(queue) == [("c", 6, 7)]


def test_a_large_request_goes_behind_the_others_after_each_turn() -> None:
    queue: RowQueue[str] = RowQueue(10, turn_rows=6)
    queue.push(ticket("big", 35))
    queue.push(ticket("b", 4))
    queue.push(ticket("c", 4))
    assert formed(queue) == [("big", 0, 6), ("b", 0, 4)]
    assert formed(queue) == [("c", 0, 4), ("big", 6, 12)]
    assert formed(queue) == [("big", 12, 22)]
    assert formed(queue) == [("big", 22, 32)]
    assert formed(queue) == [("big", 32, 35)]


def test_a_request_that_takes_several_turns_in_a_batch_is_one_part_of_it() -> None:
    queue: RowQueue[str] = RowQueue(100, turn_rows=10)
    queue.push(ticket("a", 35))
    queue.push(ticket("b", 15))
    assert formed(queue) == [("a", 0, 35), ("b", 0, 15)]


def test_a_turn_that_a_batch_cuts_goes_on_in_the_next_one() -> None:
    queue: RowQueue[str] = RowQueue(10, turn_rows=8)
    queue.push(ticket("a", 20))
    queue.push(ticket("b", 20))
    assert formed(queue) == [("a", 0, 8), ("b", 0, 2)]
    assert formed(queue) == [("b", 2, 8), ("a", 8, 12)]
    assert formed(queue) == [("a", 12, 16), ("b", 8, 14)]


def test_a_turn_is_a_quarter_of_a_batch_but_not_less_than_256_rows_or_a_batch() -> None:
    assert [RowQueue[str](rows).turn_rows for rows in (4096, 1024, 512, 10)] == [1024, 256, 256, 10]


def test_a_request_is_expired_from_its_deadline_on_and_not_before() -> None:
    queue: RowQueue[str] = RowQueue(10)
    queue.push(ticket("a", 3, deadline=5.0))
    queue.push(ticket("b", 3, deadline=5.1))
    parts, expired = queue.form(now=5.0)
    assert [t.item for t in expired] == ["a"]
    assert [p.ticket.item for p in parts] == ["b"]
    assert queue.rows == 0


def test_a_discarded_request_leaves_no_rows_behind() -> None:
    queue: RowQueue[str] = RowQueue(10)
    big, other = ticket("big", 25), ticket("other", 2)
    queue.push(big)
    queue.push(other)
    queue.form(0.0)
    queue.discard(big)
    queue.discard(big)
    assert queue.rows == 2
    assert formed(queue) == [("other", 0, 2)]


requests = st.lists(
    st.tuples(st.integers(1, 40), st.integers(-2, 2), st.one_of(st.none(), st.integers(0, 8))), min_size=1, max_size=25
)


@given(requests, st.integers(1, 16), st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 24)), max_size=40))
def test_every_row_is_given_out_once_in_order_within_the_bound_unless_discarded_or_expired(
    wanted: list[tuple[int, int, int | None]], max_batch_rows: int, steps: list[tuple[int, int | None]]
) -> None:
    """A step is how many requests arrive before a batch is formed, and which one is cancelled, if any."""
    queue: RowQueue[int] = RowQueue(max_batch_rows)
    tickets = [
        Ticket(i, rows, None if deadline is None else float(deadline), priority, 0.0)
        for i, (rows, priority, deadline) in enumerate(wanted)
    ]
    waiting, gone, now = list(tickets), set[int](), 0.0
    given_rows: dict[int, list[int]] = {i: [] for i in range(len(tickets))}
    while True:
        arrivals, cancelled = steps.pop() if steps else (len(tickets), None)
        for _ in range(min(arrivals, len(waiting))):
            queue.push(waiting.pop(0))
        if cancelled is not None and cancelled < len(tickets) and tickets[cancelled] not in waiting:
            queue.discard(tickets[cancelled])
            if tickets[cancelled].left:
                gone.add(cancelled)
        now += 0.5
        parts, expired = queue.form(now)
        for t in expired:
            assert t.deadline is not None
            assert t.deadline <= now
            gone.add(t.item)
        assert sum(p.stop - p.start for p in parts) <= max_batch_rows
        for p in parts:
            assert p.ticket.item not in gone
            assert p.ticket.deadline is None or p.ticket.deadline > now
            given_rows[p.ticket.item] += range(p.start, p.stop)
        priorities = [p.ticket.priority for p in parts]
        assert priorities == sorted(priorities, reverse=True)
        pushed = [t for t in tickets if t not in waiting and t.item not in gone]
        assert queue.rows == sum(t.left for t in pushed)
        assert not queue.rows or sum(p.stop - p.start for p in parts) == max_batch_rows
        if not parts and not waiting:
            break
    for t in tickets:
        rows = given_rows[t.item]
        assert rows == list(range(len(rows)))
        assert len(rows) == t.rows or t.item in gone


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(1, 16), st.integers(1, 16))
def test_a_newcomer_of_at_most_a_turn_waits_for_at_most_a_turn_of_each_request_before_it(
    sizes: list[int], max_batch_rows: int, turn_rows: int
) -> None:
    queue: RowQueue[str] = RowQueue(max_batch_rows, turn_rows)
    for i, rows in enumerate(sizes):
        queue.push(ticket(f"r{i}", rows))
    queue.push(ticket("last", 1))
    before = 0
    while True:
        rows = {p.ticket.item: p.stop - p.start for p in queue.form(0.0)[0]}
        if "last" in rows:
            break
        before += sum(rows.values())
    assert before <= sum(min(rows, turn_rows) for rows in sizes)


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=8),
    st.integers(1, 16),
    st.integers(1, 16),
    st.data(),
)
def test_what_two_waiting_requests_are_given_differs_by_at_most_a_turn(
    sizes: list[int], max_batch_rows: int, turn_rows: int, data: st.DataObject
) -> None:
    """Over every stretch of batches in which both wait, whoever else arrives or leaves meanwhile."""
    queue: RowQueue[int] = RowQueue(max_batch_rows, turn_rows)
    tickets = [Ticket(i, rows, None, 0, 0.0) for i, rows in enumerate(sizes)]
    waiting = list(tickets)
    history: list[dict[int, int]] = []  # what each request that waited before and after a batch had been given by then
    queue.push(waiting.pop())
    queue.push(waiting.pop())
    while queue.rows:
        before = {t.item: t.next_row for t in tickets if t not in waiting and t.left}
        history.append(before)
        queue.form(0.0)
        history.append({t.item: t.next_row for t in tickets if t.item in before and t.left})
        if waiting and data.draw(st.booleans()):
            queue.push(waiting.pop())
    for i, then in enumerate(history):
        for later in history[i:]:
            both = then.keys() & later.keys()
            given_rows = [later[k] - then[k] for k in both]
            assert not given_rows or max(given_rows) - min(given_rows) <= turn_rows


@given(requests, st.integers(0, 40), st.data())
def test_a_batch_that_all_fits_into_is_what_a_simple_model_says(
    wanted: list[tuple[int, int, int | None]], given_before: int, data: st.DataObject
) -> None:
    """Some rows are given out before, so that requests are met that are in part on the device."""
    queue: RowQueue[int] = RowQueue(max(given_before, 1))
    tickets = [
        Ticket(i, rows, None if deadline is None else float(deadline), priority, 0.0)
        for i, (rows, priority, deadline) in enumerate(wanted)
    ]
    for t in tickets:
        queue.push(t)
    if given_before:
        queue.form(-1.0)
    left = {t.item: (t.next_row, t.rows) for t in tickets if t.left}
    now = float(data.draw(st.integers(0, 9)))
    queue.max_batch_rows = 25 * 40
    parts, expired = queue.form(now)
    late = {i for i in left if (deadline := tickets[i].deadline) is not None and deadline <= now}
    assert {t.item for t in expired} == late
    assert {p.ticket.item: (p.start, p.stop) for p in parts} == {i: left[i] for i in left if i not in late}
    assert len(parts) + len(expired) == len(left)
    assert [p.ticket.priority for p in parts] == sorted((p.ticket.priority for p in parts), reverse=True)
    assert all(tickets[i].next_row == left[i][0] for i in late)
    assert queue.rows == 0
    assert queue.form(now) == ([], [])
