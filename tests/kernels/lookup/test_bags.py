"""Bags of very different lengths in one lookup: cut into parts, pooled by the kernel, against sums in float64."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from kernels.lookup import bag_parts as cut
from kernels.lookup import embedding
from kernels.lookup.bag_parts import FAR, FARTHER, FLIGHT, LONG, BagParts, Rows, bag_parts, rows_of
from kernels.lookup.descriptors import REACH
from kernels.lookup.plan import IdColumn, Kind, Slot, TableShape
from kernels.lookup.tiling import bag_tiling
from kernels.runtime.state import STATE_WORDS
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state
from tests.kernels.lookup.test_lookup import OnDevice, batch_of, on_the_bus, plan_of, scales_of, some_padding, tables_of

F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
MLPERF = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # ids a feature, DLRM-DCNv2
LENGTHS = (100, 1, 2, 33, 7, 8, 9, 64, 1, 31)
POOLINGS = {}, {"mean": True}, {"largest": True}  # sum, mean, max
DEVICES = [pytest.param("host", id="host", marks=pytest.mark.bulk), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def on_host(request, monkeypatch, run_folder):
    if request.node.get_closest_marker("gpu") is None:
        host_cuda.put_under(monkeypatch, embedding, run_folder)


def bags_plan(lengths, dims, dtype=F32, context=(), width=0, first_order=False, rows=97, poolings=POOLINGS):
    """A feature a length, each with a table of its own of the next of the dims, pooled in the next of the ways; `context`:
    which are of the context.
    """
    sides, columns, slots, totals, out = {True: 0, False: 0}, [], [], [], 0
    shapes = [TableShape(rows + 7 * i, dims[i % len(dims)], dtype) for i in range(len(lengths))]
    for i, length in enumerate(lengths):
        side = i in context
        sources = [-1 - (sides[side] + j) if side else sides[side] + j for j in range(length)]
        pooling = poolings[i % len(poolings)] if length > 1 else {}
        slots.append(Slot(Kind.GATHER, shapes[i].dim, out, len(columns), length, **pooling))
        columns += [IdColumn(s, i, 5, True) for s in sources]
        sides[side] += length
        out += shapes[i].dim
    if first_order:
        for slot in slots[:]:
            totals.append(replace(slot, dim=1, out=0, first=len(columns)))
            own = columns[slot.first : slot.first + slot.columns]
            columns += [replace(c, table=len(shapes)) for c in own]
            shapes.append(TableShape(shapes[own[0].table].rows, 1, F32))
    return plan_of(shapes, columns, slots, totals, sides[True], sides[False], width=width)


def pooled(plan, tables, batch, rows, slots):
    """Each slot's columns from the formula, in float64, and the sum of its terms' magnitudes."""
    scales = scales_of(plan)
    out, magnitude = [], []
    for slot in slots:
        at = [c.source for c in plan.columns[slot.first : slot.first + slot.columns]]
        table = plan.columns[slot.first].table
        values = tables[table].double() * (1.0 if scales[table] is None else scales[table].double())
        context = batch.context_ids[batch.request_of_row[:rows].long()]
        ids = torch.stack([context[:, -1 - s] if s < 0 else batch.candidate_ids[:rows, s] for s in at], 1).long()
        there = ids != -1
        ids = torch.where((ids >= len(values)) | (ids < -1), plan.columns[slot.first].oov, ids)
        read = values[ids.clamp(min=0)] * there[:, :, None]
        count = there.sum(1, keepdim=True).clamp(min=1) if slot.mean else 1
        if slot.largest:
            most = values[ids.clamp(min=0)].masked_fill(~there[:, :, None], -torch.inf).amax(1)
            out.append(torch.where(there.any(1, keepdim=True), most, 0.0))
        else:
            out.append(read.sum(1) / count)
        magnitude.append(read.abs().sum(1) / count)
    return out, magnitude


def check(plan, device, rows, ids=some_padding, out_dtype=F32, bound=8 * 2.0**-23, tables=None, refused=0):
    tables = tables or tables_of(plan)
    batch = batch_of(plan, rows, contexts=min(rows, 5), ids=ids)
    lookup = OnDevice(plan, tables, device, out_dtype)
    x, total = lookup(batch, rows)
    out, magnitude = pooled(plan, tables, batch, rows, plan.x_slots)
    want, allowed = torch.cat(out, 1), bound * torch.cat(magnitude, 1) + 1e-30
    if out_dtype != F32:
        allowed += 2.0**-8 * want.abs()
    assert not torch.isnan(x).any()
    assert ((x.double() - want).abs() <= allowed).all()
    if plan.total_slots:
        out, magnitude = pooled(plan, tables, batch, rows, plan.total_slots)
        assert ((total.double() - sum(out)).abs() <= bound * sum(magnitude)).all()
    again, _ = lookup(batch, rows)
    assert torch.equal(x, again)
    return lookup, batch, x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((4,), F32), ((4,), I8), ((8,), F16), ((16,), I8), ((16,), F32), ((64,), F16), ((128,), BF16), ((128,), I8), ((10,), F16),
     ((40, 16), F16), ((40, 16), I8), ((12, 3, 64), F32), ((12, 3, 64), I8)],
    ids=str,
)  # fmt: skip
def test_bags_of_any_length_and_dim_are_pooled_in_one_launch(dims, dtype, device):
    check(bags_plan(LENGTHS, dims, dtype), device, 11)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, F16, I8])
@pytest.mark.parametrize("rows", [9, 300])
def test_the_bags_of_mlperf(rows, dtype, out_dtype, device):
    if device == "host" and (rows > 9 or dtype == F32):
        pytest.skip("a GPU has the time")
    plan = bags_plan(MLPERF, (128,), dtype, poolings=[{}])
    lookup, _, _ = check(plan, device, rows, lambda rng, n, size: rng.integers(0, size, n), out_dtype)
    bags = lookup.lookup.bags
    assert len(bags.joins) == 1
    assert bags.team == 128 // (16 // dtype.itemsize)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(100, 5, 1, 40), (20, 1, 3), (9, 12, 2)])
@pytest.mark.parametrize("processors", [132, 4])
def test_float32_bags_have_the_same_bits_in_segments_with_blocks_of_one_row_and_of_several(processors, lengths, device):
    plan = bags_plan(lengths, (64, 16), F32)
    tables, batch = tables_of(plan), batch_of(plan, 9, ids=some_padding)
    whole, pieces = OnDevice(plan, tables, device), OnDevice(plan, tables, device, segments=3)
    for own in (whole, pieces):
        own.lookup._processors = processors
    want, (out, magnitude) = whole(batch, 9)[0], pooled(plan, tables, batch, 9, plan.x_slots)
    assert torch.equal(want, pieces(batch, 9)[0])
    assert ((want.double() - torch.cat(out, 1)).abs() <= 2.0**-20 * torch.cat(magnitude, 1)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F16, I8])
def test_how_many_rows_are_in_flight_changes_no_bit(dtype, device, monkeypatch):
    """As many rows as launches of few or of many rows have, by the number of multiprocessors that they are told."""
    plan, found = bags_plan(LENGTHS, (64,), dtype), []
    for processors in (132, 1):
        monkeypatch.setattr(
            embedding, "bag_tiling", lambda r, u, t, b, _, *more, own=processors: bag_tiling(r, u, t, b, own, *more)
        )
        lookup, _, x = check(plan, device, 21)
        found.append((lookup.lookup.tiling(21, pinned=False).flight, x))
    assert [flight for flight, _ in found] == [8, 4]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 4, 8, (8, 2), (1, 8)])
def test_ids_of_every_width_context_and_first_order_bags(width, device):
    plan = bags_plan(LENGTHS, (16,), F16, context=(0, 2, 5), width=width, first_order=True)
    check(plan, device, 21)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, I8])
def test_empty_bags_are_zero_whatever_lies_beside_them(dtype, device):
    """Parts of a bag that are all padding count for nothing, nor does a bag of such parts."""
    plan = bags_plan((100, 100, 100, 40, 3, 40), (16,), dtype)
    tables = [-t.abs() - 1 if dtype == F32 else t.clamp(max=-1) for t in tables_of(plan)]  # a zero among maxima would win
    empty = {*range(300), 300, 339, 342, *range(343, 380)}
    drawn = iter([np.full(2, -1) if c in empty else np.array([3, -1]) for c in range(383)])
    _, _, x = check(plan, device, 2, lambda rng, n, size: next(drawn), tables=tables)
    assert torch.equal(x[:, :48], torch.zeros(2, 48))
    assert torch.equal(x[1], torch.zeros(96))
    assert (x[0, 48:] < 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_an_id_outside_its_table_is_counted_once_whoever_shares_its_row(width, device):
    plan = bags_plan((100, 2, 1), (128,), F16, width=width)
    plan = replace(plan, columns=tuple(replace(c, oov=5) for c in plan.columns))
    lookup, _, _ = check(plan, device, 3, lambda rng, n, size: np.where(np.arange(n) == 1, 120, 7))
    assert lookup.out_of_range == 2 * 103
    lookup.descriptors.out_of_range.zero_()


@pytest.mark.covering(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, I8])
@pytest.mark.parametrize("ranked", [False, True])
def test_bags_over_tables_in_segments_and_of_both_generations(ranked, dtype, device):
    plan = bags_plan((100, 5, 1, 40), (64, 16), dtype, first_order=True)
    tables, batch = tables_of(plan), batch_of(plan, 9, ids=some_padding)
    whole, pieces = OnDevice(plan, tables, device), OnDevice(plan, tables, device, segments=5, ranked=ranked)
    for generation in (0, 1):
        for a, b in zip(whole(batch, 9, generation=generation), pieces(batch, 9, generation=generation), strict=True):
            assert torch.equal(a, b)
    moved = whole.other if dtype != I8 else None
    if moved is not None:
        out, magnitude = pooled(plan, [t.cpu() for t in moved], batch, 9, plan.x_slots)
        got = whole(batch, 9, generation=1)[0].double()
        assert ((got - torch.cat(out, 1)).abs() <= 2.0**-20 * torch.cat(magnitude, 1)).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "dtype"), [((1,) * 4, F16), ((7, 1, 2, 40), I8)])
@pytest.mark.parametrize("rows", [9, 530, 1100])  # from four and from eight rows a multiprocessor on otherwise
def test_a_lookup_that_goes_table_by_table_gives_the_same_bits(rows, lengths, dtype, device):
    plan = bags_plan(lengths, (64, 16), dtype, first_order=True)
    tables, batch = tables_of(plan), batch_of(plan, rows, ids=some_padding)
    far = partial(OnDevice, plan, tables, device, segments=3, ranked=True)
    row_by_row, by_table, few_cold = far(spread=REACH), far(spread=REACH + 1), far(spread=REACH + 1, cold_reads=0.0)
    assert bool(by_table.lookup.bags.singles) == (1 in lengths)
    for a, b, c in zip(row_by_row(batch, rows), by_table(batch, rows), few_cold(batch, rows), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert not torch.isnan(b).any()
    assert row_by_row.out_of_range == by_table.out_of_range


@pytest.mark.parametrize("device", DEVICES)
def test_bags_of_few_cold_reads_are_cut_as_near_ones(device):
    plan = bags_plan((8,) * 16, (64,), F16)
    tables = tables_of(plan)
    far = partial(OnDevice, plan, tables, device, segments=3)
    near, few, many = (
        far(spread=s, cold_reads=n).lookup.tiling(2000, True) for s, n in ((REACH, 9), (REACH + 1, 1), (REACH + 1, 9))
    )
    assert near == few != many


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("share", "in_flight", "evict_first"), [(1, 8, False), (7, 4, True), (20, 4, True), (40, 4, False)])
def test_rows_of_a_batch_come_out_alike_wherever_they_lie(share, in_flight, evict_first, device, monkeypatch):
    """Which block has a row, and which warp takes a part, changes no bit. share: rows of a multiprocessor."""
    plan = bags_plan(MLPERF, (64,), F16, poolings=POOLINGS[1:])
    rows = 40 if device == "host" else 3000
    own = -(-rows // share)  # multiprocessors that they are told, and that ids lie on the device
    monkeypatch.setattr(embedding, "rows_of", lambda r, _: rows_of(r, own))
    monkeypatch.setattr(embedding, "bag_tiling", lambda r, u, t, b, _, pinned, tiers: bag_tiling(r, u, t, b, own, False, tiers))
    lookup, _, x = check(
        plan, device, rows, lambda rng, n, size: np.resize(np.random.default_rng(size).integers(0, size, 8), n)
    )
    t = lookup.lookup.tiling(rows, pinned=False)
    assert (t.flight, t.evict_first) == (in_flight, evict_first)
    assert dict(lookup.lookup.source(rows, pinned=False).constants)["EVICT_FIRST"] == str(int(evict_first))
    assert torch.equal(x, x[torch.arange(rows) % 8])


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_of_a_bucket_are_not_written(device):
    plan = bags_plan((100, 3, 1), (16,), F16)
    lookup = OnDevice(plan, tables_of(plan), device)
    lookup(batch_of(plan, 21, contexts=2, capacity=64), 21, capacity=64)
    assert torch.isnan(lookup.padding[0]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_launch_ahead_of_its_rows_gives_the_same_bits(device):
    plan = bags_plan((100, 3, 1, 40), (16,), F16, context=(1,), first_order=True)
    lookup, batch, rows = OnDevice(plan, tables_of(plan), device), batch_of(plan, 50, contexts=3, ids=some_padding), 50
    want = lookup(batch, rows)
    x, total = torch.full((rows, 64), torch.nan, device=lookup.memory), torch.full((rows, 1), torch.nan, device=lookup.memory)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=lookup.memory)
    for turn in range(1, 3):
        lookup.lookup(on_the_bus(plan, batch), rows, x, total, state, ahead=True)
        assert torch.equal(state, lane_state(rows, lookup.memory, batch_number=turn))
        assert torch.equal(x.cpu(), want[0])
        assert torch.equal(total.cpu(), want[1])


@pytest.mark.parametrize("vector", [4, 8, 16])
@pytest.mark.parametrize("dims", [(16,), (128,), (16, 80), (272,), (20, 12)], ids=str)
def test_parts_cover_every_id_of_every_column_once(dims, vector):
    plan = bags_plan((*MLPERF, 1000), dims, I8)
    bags, others = bag_parts(plan, vector)
    covered = {}
    for part in (*bags.parts, *bags.singles):
        for i in range(part.ids):
            for c in range(bags.columns):
                key = part.id + i * part.how.id_bytes, part.out + c
                assert key not in covered
                covered[key] = part
    for slot in plan.x_slots:
        at, width = plan.id_place(plan.columns[slot.first])
        keys = [(at + i * width, slot.out + c) for i in range(slot.columns) for c in range(slot.dim)]
        assert (slot in others) == (not any(key in covered for key in keys))
        assert (slot in others) == (slot.dim % vector > 0 or slot.out % vector > 0)
        if slot not in others:
            assert all(key in covered for key in keys)
            assert sum(covered[key].how.counted for key in keys) == slot.columns * bags.columns
    assert sorted(part.number for part in bags.parts if part.number < 0xFFFF) == list(range(bags.sums))
    assert sorted(j.number + i for j in bags.joins for i in range(j.ids)) == list(range(bags.sums))
    assert [part.ids for part in bags.parts] == sorted((part.ids for part in bags.parts), reverse=True)
    assert bags.read_bytes == sum(slot.columns * slot.dim for slot in plan.x_slots if slot not in others)


def test_where_a_row_has_a_block_alone_a_bag_is_cut_into_parts_that_are_read_at_once():
    plan = bags_plan(MLPERF, (128,), F16)
    few, others = bag_parts(plan, 8, None, Rows.ALONE)
    many, _ = bag_parts(plan, 8)
    assert few.read_bytes == many.read_bytes == 214 * 256
    assert max(part.ids for part in few.parts) == 12 < max(part.ids for part in many.parts), (
        "a bag that is not long stays whole"
    )
    assert len(few.parts) == sum(-(-n // FLIGHT) if n > LONG else 1 for n in MLPERF if n > 1)
    assert bag_parts(plan, 8, FAR, Rows.ALONE)[0] == few, "and in tiers it is cut no otherwise"
    assert others == []
    sixty, _ = bag_parts(bags_plan((100,) * 60, (16,), F16), 8, None, Rows.ALONE)
    assert {part.ids for part in sixty.parts} == {24, 28}, "eight ids a part would be too many parts"
    lookup = OnDevice(plan, tables_of(plan), "host", F32).lookup
    sizes = {rows: lookup.tiling(rows, pinned=True) for rows in (1, 132, 133)}
    assert (sizes[1], sizes[1].rows) == (sizes[132], 1)
    assert sizes[1].unit_threads >= (len(few.parts) + len(few.singles)) * few.team
    assert sizes[133].unit_threads == 320


@pytest.mark.parametrize("device", DEVICES)
def test_launches_of_one_row_of_some_and_of_more_a_multiprocessor_cut_bags_alike_in_tiers(device):
    plan, longest = bags_plan(MLPERF, (64,), I8), []
    near, far = (OnDevice(plan, tables_of(plan), device, segments=n).lookup for n in (1, 3))
    for rows in (132, 133, 264, 265, 1056, 1057):
        near._processors = far._processors = 132
        bags = near._cut_for(rows).bags
        assert far._cut_for(rows).bags == bags
        longest.append(max(part.ids for part in bags.parts))
    assert longest == [12, 28, 28, 16, 16, 28]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("longest", "records"), [(16, 1), (17, 3), (32, 3)])
def test_bags_that_all_launches_cut_alike_have_their_records_once(longest, records, device):
    plan = bags_plan((longest, 9, 1), (128,), F16)
    assert len(OnDevice(plan, tables_of(plan), device).lookup._cuts) == records


@pytest.mark.parametrize("device", DEVICES)
def test_a_cut_whose_records_would_not_fit_in_tiers_is_made_nowhere(device):
    plan = bags_plan((100,) * 20, (16,), F16, width=4)  # 280 records of a row alone: 42 KB of shared memory, in tiers 47
    near, far = (OnDevice(plan, tables_of(plan), device, segments=n).lookup for n in (1, 3))
    assert near._cut_for(1).bags == far._cut_for(1).bags == near.bags


def test_sums_of_a_row_stay_small_and_too_many_parts_or_no_long_bag_are_none():
    plan = bags_plan((100,) * 60, (128,), F16)
    for of in (Rows.SOME, Rows.OTHER):
        bags, _ = bag_parts(plan, 8, None, of)
        assert bags.sum_bytes == bags.shared_bytes(1) - bags.shared_bytes(0) <= 8192
        assert {part.ids for part in bags.parts} == {100}
    for none in (bags_plan((17,) * 400, (16,), F16), bags_plan((16,) * 40, (16,), F16), bags_plan((1,) * 9, (16,), F16)):
        assert bag_parts(none, 8) == (BagParts(), list(none.x_slots))
    assert all(size % 16 == 0 for size in cut.PART_BYTES)


def test_in_tiers_every_bag_of_several_ids_goes_by_parts():
    plan = bags_plan((1, 2, 9, 16), (16,), F16)
    bags, others = bag_parts(plan, 8, FAR)
    assert [part.ids for part in bags.parts] == [16, 9, 2]
    assert len(bags.singles) == 1
    assert others == []
    single = bags_plan((1,) * 4, (16,), F16)
    assert bag_parts(single, 8, FAR) == (BagParts(), list(single.x_slots))
    bags, others = bag_parts(single, 8, FARTHER)
    assert (len(bags.parts), len(bags.singles), others) == (0, 4, [])
