"""Slots against the plainest model of them: which rows are held, and what lies in each slot."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from dpiframe_core.far_rows import row_slots
from dpiframe_core.far_rows.row_slots import RowSlots

ROWS, SLOTS, NEAR = (10, 6), (4, 3), 5
KEYS = st.lists(st.integers(0, sum(ROWS) - 1), min_size=1, max_size=6, unique=True).map(sorted)


def group_of(key):
    return int(key >= ROWS[0])


class Machine(RuleBasedStateMachine):
    """`memory`: the row that was last read into each slot, as the threads that read would have it. `near`: which lie nearer."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.slots, self.memory, self.open, self.reads = RowSlots(ROWS, SLOTS, NEAR), {}, [], 0
        self.reading = {}  # number of a read -> key -> slot
        self.near, self.left = {}, []  # key -> number; (key, number) whose numbers are not free yet

    @rule(target=leases, keys=KEYS)
    def take(self, keys):
        keys = np.array(keys)
        self.reads += 1
        known = {k: int(self.slots._slot[k]) - 1 for k in keys.tolist() if self.slots._slot[k]}
        found = self.slots.take(keys, self.reads)
        if isinstance(found, int):
            busy = {s for lease in self.open for s in lease["slots"].tolist()} | set(known.values())
            busy |= {s for own in self.reading.values() for s in own.values()}
            left = SLOTS[found] - len([s for s in busy if s < sum(SLOTS) and int(s >= SLOTS[0]) == found])
            asked = len([k for k in keys.tolist() if group_of(k) == found and k not in known])
            assert asked > left, "refused though there was room"
            return multiple()
        slots = dict(zip(keys.tolist(), found.slots.tolist(), strict=True))
        assert len(set(slots.values())) == len(slots)
        assert {k: s for k, s in slots.items() if s >= sum(SLOTS)} == {k: n for k, n in self.near.items() if k in slots}
        missing = {k: slots[k] for k in keys[found.missing].tolist()}
        for key in slots.keys() - self.near.keys():
            assert group_of(key) == int(slots[key] >= SLOTS[0])
            if key not in missing:
                waits = [n for n, own in self.reading.items() if own.get(key) == slots[key]]
                assert set(waits) <= set(found.reads.tolist())
                assert waits or self.memory[slots[key]] == key
        if missing:
            self.reading[self.reads] = missing
        lease = {"rows": slots, "slots": found.slots, "read": self.reads}
        self.open.append(lease)
        return lease

    @rule(lease=leases)
    def arrive(self, lease):
        own = self.reading.pop(lease["read"], None)
        if own:
            self.memory |= {slot: key for key, slot in own.items()}
            self.slots.arrived(np.array(list(own.values())))

    @rule(lease=leases)
    def fail(self, lease):
        own = self.reading.pop(lease["read"], None)
        if own:
            self.slots.forget(np.array(list(own.values())))
            assert not self.slots.lies(np.array(list(own)), np.array(list(own.values()))).any()
            for other in self.open:  # who waited for them has failed, too
                other["rows"] = {k: s for k, s in other["rows"].items() if s not in own.values()}

    @rule(lease=consumes(leases))
    def give_back(self, lease):
        self.slots.give_back(lease["slots"])
        self.open = [other for other in self.open if other is not lease]

    @rule(keys=KEYS)
    def rows_come_near(self, keys):
        keys = [k for k in keys if k not in self.near]
        brought = self.slots.bring(np.array(keys, np.int64))
        assert brought == min(len(keys), NEAR - len(self.near) - len(self.left))
        numbers = [int(self.slots._slot[k]) - 1 for k in keys[:brought]]
        assert not set(numbers) & {n for _, n in (*self.near.items(), *self.left)}
        self.near |= dict(zip(keys[:brought], numbers, strict=True))
        assert self.slots.near(np.arange(sum(ROWS))).nonzero()[0].tolist() == sorted(self.near)

    @rule(keys=KEYS)
    def rows_leave(self, keys):
        own = [k for k in keys if k in self.near]
        assert self.slots.leave(np.array(keys)) == len(own)
        self.left += [(k, self.near.pop(k)) for k in own]

    @rule()
    def numbers_of_rows_that_left_are_free_when_nobody_holds_them(self):
        held = {s for lease in self.open for s in lease["slots"].tolist()}
        self.left = [(k, n) for k, n in self.left if n in held]
        assert sorted(self.slots.lingering().tolist()) == sorted(k for k, _ in self.left)

    @rule(keys=KEYS)
    def rows_are_to_stay(self, keys):
        self.slots.stay(np.array(keys))
        assert self.slots.staying == len([k for k in keys if self.slots._slot[k] and k not in self.near])

    @invariant()
    def a_held_row_that_was_read_lies_where_it_was_found(self):
        pending = {s for own in self.reading.values() for s in own.values()}
        for lease in self.open:
            for key, slot in lease["rows"].items():
                assert slot in pending or slot >= sum(SLOTS) or self.memory[slot] == key
                assert self.slots.lies(np.array([key]), np.array([slot]))[0] == (slot not in pending)


Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestSlots = Machine.TestCase


def lie(slots, *keys):
    """They are read, and given back. Their slots, and which were missing."""
    found = slots.take(np.array(keys), 1)
    slots.arrived(found.slots)
    slots.give_back(found.slots)
    return found.slots.tolist(), np.array(keys)[found.missing].tolist()


def test_a_row_that_was_asked_for_again_outlives_one_that_was_not():
    slots = RowSlots([10], [3])
    for key in (1, 2, 3):
        lie(slots, key)
    assert lie(slots, 4)[1] == [4]  # the hand has gone round: nothing has been asked for since but 4
    lie(slots, 2)
    assert lie(slots, 5)[1] == [5]
    assert lie(slots, 2)[1] == []


def test_rows_that_are_to_stay_outlive_those_asked_for_since_and_give_way_to_a_request_that_needs_all():
    slots = RowSlots([20], [4])
    lie(slots, 1, 2, 3, 4)
    slots.stay(np.array([2, 3, 9]))
    for key in range(5, 12):
        lie(slots, key)
        lie(slots, key)
    assert slots.staying == 3
    assert lie(slots, 2, 3, 9)[1] == []
    assert lie(slots, 12, 13, 14, 15)[1] == [12, 13, 14, 15]
    assert slots.staying == 0


def test_nothing_is_held_after_a_refusal_which_names_the_group():
    slots = RowSlots([10, 10], [4, 2])
    slots.take(np.array([11]), 1)
    assert slots.take(np.array([1, 2, 12, 13]), 2) == 1
    assert [slots.held(0), slots.held(1)] == [0, 1]
    assert not isinstance(slots.take(np.array([1, 12]), 3), int)


@pytest.mark.parametrize("window", [1, 3, 1024])
def test_any_number_of_slots_is_found_however_the_hand_goes(monkeypatch, window):
    monkeypatch.setattr(row_slots, "_WINDOW", window)
    slots = RowSlots([100], [7])
    rng = np.random.default_rng(0)
    for _ in range(200):
        keys = np.sort(rng.choice(100, rng.integers(1, 8), replace=False))
        assert len(set(lie(slots, *keys.tolist())[0])) == len(keys)
    assert slots.take(np.arange(8), 1) == 0


def test_a_row_that_could_not_be_read_is_asked_for_anew():
    slots = RowSlots([10], [1])
    found = slots.take(np.array([7]), 5)
    assert slots.take(np.array([7]), 6).reads.tolist() == [5]
    slots.forget(found.slots)
    slots.give_back(found.slots)
    slots.give_back(found.slots)
    assert slots.take(np.array([7]), 8).missing.tolist() == [True]
    assert slots.held(0) == 1
