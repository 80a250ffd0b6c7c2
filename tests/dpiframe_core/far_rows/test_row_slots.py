"""Slots against the plainest model of them: which rows are held, and what lies in each slot."""

from concurrent.futures import Future

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from dpiframe_core.far_rows.row_slots import RowSlots

SLOTS = 4
ROWS = st.lists(st.integers(0, 9), min_size=1, max_size=SLOTS + 1, unique=True)


class Machine(RuleBasedStateMachine):
    """`memory`: the row that was last read into each slot, as the threads that read would have it."""

    leases, reads = Bundle("leases"), Bundle("reads")

    def __init__(self):
        super().__init__()
        self.slots, self.memory, self.open = RowSlots(SLOTS), {}, []

    @rule(target=leases, rows=ROWS)
    def take(self, rows):
        held = {row for lease in self.open for row in lease["rows"]}
        reading = {row for lease in self.open for row in lease["reading"]}
        found = self.slots.take(rows)
        if found is None:
            pending = set(self.slots._reads) - held - set(rows)
            assert len(held | set(rows) | pending) > SLOTS, "refused though there was room"
            return multiple()
        assert len(set(found.slots)) == len(rows)
        for row, slot in zip(rows, found.slots, strict=True):
            known = row not in dict(found.missing)
            assert not known or row in reading or self.memory[slot] == row or row in self.slots._reads
        read = Future()
        self.slots.reading(dict(found.missing), read)
        lease = {"rows": rows, "slots": found.slots, "reading": dict(found.missing), "read": read, "failed": False}
        self.open.append(lease)
        return lease

    @rule(lease=leases)
    def arrive(self, lease):
        if not lease["reading"]:
            return
        self.memory |= {slot: row for row, slot in lease["reading"].items()}
        self.slots.arrived(lease["reading"])
        lease["reading"] = {}

    @rule(lease=consumes(leases))
    def give_back(self, lease):
        if lease["reading"]:  # its reads go on
            self.memory |= {slot: row for row, slot in lease["reading"].items()}
            self.slots.give_back(lease["rows"])
            self.slots.arrived(lease["reading"])
        else:
            self.slots.give_back(lease["rows"])
        self.open.remove(lease)

    @invariant()
    def a_held_row_that_was_read_lies_in_the_slot_it_was_given(self):
        for lease in self.open:
            for row, slot in zip(lease["rows"], lease["slots"], strict=True):
                if self.slots.is_read(row):
                    assert self.memory[slot] == row
        assert self.slots.held == len({row for lease in self.open for row in lease["rows"]})


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSlots = Machine.TestCase


def lie(slots, *rows):
    """They are read, and given back."""
    found = slots.take(rows)
    slots.arrived(rows)
    slots.give_back(rows)
    return found


def test_the_row_that_was_given_back_first_goes_first():
    slots = RowSlots(2)
    first, second = lie(slots, 1), lie(slots, 2)
    assert lie(slots, 1).missing == []
    assert lie(slots, 3).slots == second.slots
    assert lie(slots, 1).slots == first.slots


def test_nothing_is_held_after_a_refusal():
    slots = RowSlots(2)
    slots.take([1])
    assert slots.take([2, 3]) is None
    assert slots.held == 1
    assert slots.take([2]) is not None


def test_a_row_that_could_not_be_read_is_asked_for_anew():
    slots = RowSlots(1)
    (missing,) = slots.take([7]).missing
    slots.reading([7], Future())
    slots.forget(7)
    slots.give_back([7])
    assert slots.take([7]).missing == [missing]
    assert slots.held == 1
