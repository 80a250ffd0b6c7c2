"""A history that is written once a context, beside whatever else a lookup has: as a lookup writes that has each row's own."""

from dataclasses import replace

import pytest
import torch

from kernels.lookup import embedding
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.plan import IdColumn, Kind, Slot, TableShape
from kernels.runtime.state import STATE_WORDS
from tests.kernels import host_cuda
from tests.kernels.lookup.test_lookup import OnDevice, batch_of, on_the_bus, plan_of, tables_of

pytestmark = pytest.mark.bulk
F32 = torch.float32
LENGTH, DIM = 5, 8
END = LENGTH * DIM  # of the history; its mask is columns [END + 8, END + 8 + LENGTH)


@pytest.fixture(autouse=True)
def on_host(monkeypatch, run_folder):
    """The kernel's own code, run on the host."""
    host_cuda.put_under(monkeypatch, embedding, run_folder)


def some_padding(rng, n, size):
    return rng.integers(-1, size + 2, n)


def plan(long, width, first_order=True):
    """The history, a category of the context right behind it, the mask, numbers of both sides, one of a row's ids, a bag; and
    first-order terms of the history, so that rows read its ids themselves, or of a row's id, so that they may carry theirs."""
    tables = [TableShape(200, DIM, F32), TableShape(300, DIM, F32), TableShape(200, 1, F32)]
    columns = [IdColumn(-1 - i, 0, 1, True) for i in range(LENGTH)] + [IdColumn(-1 - LENGTH, 1, 2)]
    columns += [IdColumn(i, 1, 1, True) for i in range(1 + long)]
    columns += [IdColumn(-1 - i, 2, 3, True) for i in range(LENGTH)] if first_order else [IdColumn(0, 2, 3, True)]
    x = [Slot(Kind.GATHER, DIM, DIM * i, i, 1) for i in range(LENGTH)] + [Slot(Kind.GATHER, DIM, END, LENGTH, 1)]
    x += [Slot(Kind.MASK, 1, END + 8 + i, i, 1) for i in range(LENGTH)]
    at = END + 8 + LENGTH
    x += [Slot(Kind.COPY, 1, at + i, number=-1 - i) for i in range(2)] + [Slot(Kind.COPY, 1, at + 2, number=0)]
    x += [Slot(Kind.GATHER, DIM, 64, LENGTH + 1, 1), Slot(Kind.GATHER, DIM, 72, LENGTH + 2, long, mean=True)]
    totals = [Slot(Kind.GATHER, 1, 0, LENGTH + 2 + long, LENGTH if first_order else 1)]
    return plan_of(
        tables, columns, x, totals, LENGTH + 1, 1 + long, context_numbers=2, candidate_numbers=1, width=width,
        behind=range(LENGTH),
    )  # fmt: skip


ONCE = ((0, END), (END + 8, END + 8 + LENGTH))


@pytest.mark.parametrize("width", [2, 8])
@pytest.mark.parametrize("long", [3, 17])
@pytest.mark.parametrize("block", [(4, 32), (16, 64)])
@pytest.mark.parametrize("rows_read", ["the history", "what they carry", "the first words"])
def test_a_history_once_a_context_leaves_all_else_as_it_is(monkeypatch, rows_read, block, long, width):
    cut = DeviceLookup.tiling
    monkeypatch.setattr(
        DeviceLookup,
        "tiling",
        lambda self, rows, pinned: replace(cut(self, rows, pinned), rows=block[0], unit_threads=block[1]),
    )
    p, carries = plan(long, width, first_order=rows_read == "the history"), rows_read == "what they carry"
    tables = tables_of(p)
    plain = OnDevice(p, tables, "host", carries=carries)
    once = OnDevice(p, tables, "host", once=ONCE, carries=carries, segments=1 + 2 * carries, ranked=carries)
    for rows, contexts in ((1, 4), (5, 8), (53, 1), (53, 5), (53, 40)):
        batch = batch_of(p, rows, contexts, some_padding, capacity=rows + 3)
        if contexts == 5:  # a context that comes again
            batch.request_of_row[:rows] = torch.arange(rows) // 7 % contexts
        (every, all_totals), (x, totals) = (one(batch, rows, capacity=rows + 3) for one in (plain, once))
        x, request = torch.cat([x, once.padding[0][:, : p.x_width]]), batch.request_of_row[:rows].long()
        assert torch.equal(once.context_rows[:rows].long(), request)
        assert torch.equal(totals, all_totals)
        own, others = torch.zeros(p.x_width, dtype=torch.bool), torch.zeros(p.x_width, dtype=torch.bool)
        for slot in p.x_slots:
            held = own if any(first <= slot.out < end for first, end in ONCE) else others
            held[slot.out : slot.out + slot.dim] = True
        assert torch.equal(x[:rows, others], every[:, others])
        assert torch.equal(x[request][:, own], every[:, own])
        assert x[contexts:][:, own].isnan().all()


@pytest.mark.parametrize("whole", [False, True])
def test_the_ids_that_rows_read_of_a_context_are_those_of_other_columns(whole):
    """Three ids of two bytes, of which the last is no history's: one word; where all are, none."""
    columns = [IdColumn(-1 - i, 0, 1, True) for i in range(3)]
    x = [Slot(Kind.GATHER, DIM, DIM * i, i, 1) for i in range(3)]
    p = plan_of([TableShape(200, DIM, F32)], columns, x, context=3, width=2, behind=range(3 if whole else 2))
    lookup = OnDevice(p, tables_of(p), "host", once=((0, (3 if whole else 2) * DIM),)).lookup
    assert lookup._row_words == (0 if whole else 1)


def test_rows_that_carry_too_little_or_are_too_few_are_refused():
    p = plan(3, 2, first_order=False)
    lookup, batch = OnDevice(p, tables_of(p), "host", once=ONCE).lookup, on_the_bus(p, batch_of(p, 5, 2))
    given = torch.zeros(5, 104), torch.zeros(5, 1), torch.zeros(STATE_WORDS, dtype=torch.int32)
    for carried in (batch.carried[:, :-4].contiguous(), batch.carried[:4], batch.carried.T.contiguous().T):
        with pytest.raises(ValueError, match=r"lookup carried: got .*, expected contiguous \[>= 5, 12\]"):
            lookup(replace(batch, carried=carried), 5, *given, context_rows=torch.zeros(5, dtype=torch.int32))


@pytest.mark.parametrize("columns", [((0, 12),), ((4, 16),), ((72, 80),)])
def test_a_part_of_a_slot_or_a_pooled_one_is_not_written_once_a_context(columns):
    p = plan(3, 2)
    with pytest.raises(ValueError, match="expected whole slots of one id each"):
        OnDevice(p, tables_of(p), "host", once=columns)
