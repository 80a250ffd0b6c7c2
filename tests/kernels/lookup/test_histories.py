"""A history that is written once a context, beside whatever else a lookup has: as a lookup writes that has each row's own."""

from dataclasses import replace

import pytest
import torch

from kernels.lookup import embedding
from kernels.lookup.batch_header import HeaderWord
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


@pytest.mark.covering(2)
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
    assert lookup.carries != whole
    assert not OnDevice(plan(3, 2), tables_of(plan(3, 2)), "host", once=ONCE).lookup.carries  # rows read the history itself


def test_a_lookup_may_write_nothing_but_histories():
    columns = [IdColumn(-1 - i, 0, 1, True) for i in range(3)]
    x = [Slot(Kind.GATHER, DIM, DIM * i, i, 1) for i in range(3)]
    p = plan_of([TableShape(200, DIM, F32)], columns, x, context=3, width=2, behind=range(3))
    plain, once = (OnDevice(p, tables_of(p), "host", once=spans) for spans in ((), ((0, 3 * DIM),)))
    batch = batch_of(p, 7, 3, some_padding)
    assert torch.equal(once(batch, 7)[0][batch.request_of_row.long()], plain(batch, 7)[0])


@pytest.mark.parametrize("contexts", [1, 3, 40, 300])
def test_a_launch_ahead_of_its_rows_learns_from_its_first_block_how_many_contexts_there_are(contexts):
    """Here all rows are staged, as blocks run one after the other."""
    p = plan(3, 2, first_order=False)
    tables = tables_of(p)
    plain, once = OnDevice(p, tables, "host"), OnDevice(p, tables, "host", once=ONCE)
    batch = batch_of(p, 600, contexts, some_padding)
    x, _ = once(batch, 600, ahead=True)
    every, request = plain(batch, 600)[0], batch.request_of_row.long()
    assert torch.equal(x[request, :END], every[:, :END])
    assert torch.equal(x[:, END : END + 8], every[:, END : END + 8])


def test_a_header_that_tells_of_more_contexts_than_there_is_room_for_writes_none_of_these():
    p = plan(3, 2, first_order=False)
    once, batch = OnDevice(p, tables_of(p), "host", once=ONCE), batch_of(p, 9, 4, capacity=12)
    batch.header[HeaderWord.STAGED_CONTEXTS] = 11
    x, _ = once(batch, 9, capacity=12, contexts=11)
    assert not x[:4, :END].isnan().any()
    assert x[4:, :END].isnan().all()


def test_a_long_history_has_the_shared_memory_that_its_parts_take():
    """A thousand ids of four bytes: a part of 480 reads as many words, of eight contexts at once."""
    length = 1000
    columns = [IdColumn(-1 - i, 0, 1, True) for i in range(length)] + [IdColumn(0, 0, 1)]
    x = [Slot(Kind.GATHER, 4, 4 * i, i, 1) for i in range(length + 1)]
    p = plan_of([TableShape(200, 4, F32)], columns, x, context=length, candidate=1, width=4, behind=range(length))
    plain, once = (OnDevice(p, tables_of(p), "host", once=spans) for spans in ((), ((0, 4 * length),)))
    batch = batch_of(p, 40, 33, some_padding)
    once_x, every = (one(batch, 40)[0] for one in (once, plain))
    assert torch.equal(once_x[batch.request_of_row.long(), : 4 * length], every[:, : 4 * length])


def test_less_memory_than_rows_of_all_contexts_is_refused():
    p = plan(3, 2, first_order=False)
    lookup, batch = OnDevice(p, tables_of(p), "host", once=ONCE).lookup, on_the_bus(p, batch_of(p, 2, 3))
    given = torch.zeros(2, 104), torch.zeros(2, 1), torch.zeros(STATE_WORDS, dtype=torch.int32)
    with pytest.raises(ValueError, match="lookup x: got memory of 2 rows, expected one for each of 3 contexts"):
        lookup(batch, 2, *given, context_rows=torch.zeros(2, dtype=torch.int32))


def test_rows_that_carry_too_little_or_are_too_few_are_refused():
    p = plan(3, 2, first_order=False)
    lookup, batch = OnDevice(p, tables_of(p), "host", once=ONCE).lookup, on_the_bus(p, batch_of(p, 5, 2))
    given = torch.zeros(5, 104), torch.zeros(5, 1), torch.zeros(STATE_WORDS, dtype=torch.int32)
    for carried in (batch.carried[:, :-4].contiguous(), batch.carried[:4], batch.carried.T.contiguous().T):
        with pytest.raises(ValueError, match=r"lookup carried: got .*, expected contiguous \[>= 5, 12\]"):
            lookup(replace(batch, carried=carried), 5, *given, context_rows=torch.zeros(5, dtype=torch.int32))


@pytest.mark.parametrize("columns", [((0, 12),), ((4, 16),), ((72, 80),), ((END + 8 + LENGTH, END + 9 + LENGTH),)])
def test_a_part_of_a_slot_or_a_pooled_one_or_a_number_is_not_written_once_a_context(columns):
    p = plan(3, 2)
    with pytest.raises(ValueError, match="expected whole slots of one id each"):
        OnDevice(p, tables_of(p), "host", once=columns)
