"""The multi-table lookup: stacked CPU and fused CUDA against the plain reference, with shapes and ids chosen to hurt."""

import math
import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu.lookup import PackedLookup
from kernels.lookup import embedding
from kernels.lookup.batch_header import HEADER_WORDS, HeaderWord
from kernels.lookup.descriptors import Segment, descriptors, segment_descriptors, whole
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.id_record import IdRecord, carried_bytes, id_bytes
from kernels.lookup.mapped_lookup import MappedLookup
from kernels.lookup.plan import ALWAYS_ROW_0, Batch, IdColumn, Kind, LookupPlan, Slot, TableShape
from kernels.runtime.source import KernelSource
from kernels.runtime.state import STATE_WORDS, StateWord
from tests.backends import BACKENDS
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state

F32, F16, I8 = torch.float32, torch.float16, torch.int8


def plan_of(
    tables, columns, x_slots, total_slots=(), context=0, candidate=0, context_numbers=0, candidate_numbers=0, width=0, behind=()
):  # fmt: skip
    """`width`: bytes of every id, or of a context's and a candidate's; 0: as few as the tables need. behind: a context's
    columns behind its others.
    """
    rows = {}
    for c in columns:
        rows[c.source] = max(rows.get(c.source, 0), tables[c.table].rows)
    sides = [
        IdRecord(tuple(wide or id_bytes(rows.get(source, 1)) for source in sources), frozenset(last))
        for sources, last, wide in (
            (range(-1, -1 - context, -1), behind, width[0] if isinstance(width, tuple) else width),
            (range(candidate), (), width[1] if isinstance(width, tuple) else width),
        )
    ]
    return LookupPlan(tuple(tables), tuple(columns), tuple(x_slots), tuple(total_slots),
                      *sides, context_numbers, candidate_numbers)  # fmt: skip


def batch_of(plan, rows, contexts=1, ids=None, seed=0, capacity=None):
    """A batch as the reference takes it; `ids(rng, n, table_rows)` draws ids, uniform over the tables by default."""
    rng = np.random.default_rng(seed)
    capacity = capacity or rows
    owner = {}
    for column in plan.columns:
        owner.setdefault(column.source, plan.tables[column.table].rows)

    def draw(n, side, context):
        out = np.zeros((n, len(side.widths)), np.int64)
        for i in range(len(side.widths)):
            size = owner.get(-1 - i if context else i, 1)
            out[:, i] = rng.integers(0, size, n) if ids is None else ids(rng, n, size)
        return side.widened(packed(side, out), np.int64 if 8 in side.widths else np.int32)

    request = np.full(capacity, -1, np.int32)
    request[:rows] = np.sort(rng.integers(0, contexts, rows))
    header = np.zeros(HEADER_WORDS, np.int32)
    header[HeaderWord.STAGED_ROWS], header[HeaderWord.STAGED_CONTEXTS] = rows, contexts
    arrays = (
        header,
        request,
        draw(contexts, plan.context_ids, True),
        draw(capacity, plan.candidate_ids, False),
        rng.standard_normal((contexts, plan.context_numbers)).astype(np.float32),
        rng.standard_normal((capacity, plan.candidate_numbers)).astype(np.float32),
    )
    return Batch(*map(torch.from_numpy, arrays))


def packed(side, ids):
    records = np.zeros((len(ids), side.nbytes), np.uint8)
    side.pack(ids, records)
    return records


def in_records(plan, batch):
    """The batch as a CPU takes it: ids as narrow as they come."""
    sides = (plan.context_ids, batch.context_ids), (plan.candidate_ids, batch.candidate_ids)
    context, candidate = (torch.from_numpy(packed(side, ids)) for side, ids in sides)
    return replace(batch, context_ids=context, candidate_ids=candidate)


def on_the_bus(plan, batch, carries=True):
    """The batch as a GPU takes it: the same, all in pinned memory where there is a GPU. carries: with what each row has of its
    context beside it.
    """
    narrow = in_records(plan, batch)
    if carries:
        narrow = replace(narrow, carried=carried_rows(plan, narrow))
    if not torch.cuda.is_available():
        return narrow
    tensors = (getattr(narrow, f.name) for f in fields(narrow))
    return Batch(*(t.pin_memory() if t is not None and t.numel() else t for t in tensors))


def carried_rows(plan, narrow):
    """The prefix of each row's context's ids, and its numbers; of padding what a GPU may not read."""
    if carried_bytes(plan.context_ids, plan.context_numbers) == 0:
        return torch.zeros(len(narrow.request_of_row), 0, dtype=torch.uint8)
    contexts, count = narrow.context_numbers.shape
    numbers = narrow.context_numbers.reshape(-1).view(torch.uint8).reshape(contexts, 4 * count)
    of_contexts = torch.cat([narrow.context_ids[:, : plan.context_ids.prefix_bytes], numbers], 1)
    request = narrow.request_of_row.long()
    return of_contexts[request.clamp(min=0)].masked_fill((request < 0)[:, None], 0xA5)


def tables_of(plan, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def table(t):
        if t.dtype == I8:
            return torch.randint(-128, 128, (t.rows, t.dim), generator=generator, dtype=I8)
        return torch.randn(t.rows, t.dim, generator=generator).to(t.dtype)

    return [table(t) for t in plan.tables]


def scales_of(plan, seed=2):
    """Of each int8 table: another scale for each column."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(t.dim, generator=generator) * 0.01 + 1e-4 if t.dtype == I8 else None for t in plan.tables]


def expected(plan, tables, scales, batch, rows):
    """What the reference makes of the float tables that int8 ones stand for."""
    floats = [t if s is None else (t.double() * s.double()).float() for t, s in zip(tables, scales, strict=True)]
    return reference.lookup(plan, floats, batch, rows)


ON_CPU = {"cpu": PackedLookup, "mapped": MappedLookup}
WHERE = [*BACKENDS, "mapped"]


class OnDevice:
    """A lookup on either backend: x and total (on the CPU), NaN wherever nothing was written. "host": a GPU's, by `on_host`.
    ranked: every second table lies in the order of ranks of its rows.
    """

    def __init__(
        self, plan, tables, device, out_dtype=F32, segments=1, once=(), shared=None, room=3, ranked=False, spread=0,
        cold_reads=math.inf, carries=True,
    ):  # fmt: skip
        self.plan, self.device, self.out_dtype, self.carries = plan, device, out_dtype, carries
        scales = scales_of(plan)
        if device in ON_CPU:
            self.lookup = ON_CPU[device](plan, tables, scales, out_dtype)
            return
        target = self.memory = torch.device("cpu" if device == "host" else device)
        self.ranks = [ranks_of(t, i).to(target) if ranked and i % 2 == 0 else None for i, t in enumerate(tables)]
        self.tables = [by_rank(t.to(target), ranks) for t, ranks in zip(tables, self.ranks, strict=True)]
        self.other = [t + 1 for t in self.tables]  # what generation 1 reads
        self.scales = [None if s is None else s.to(target) for s in scales]
        self.other_scales = [None if s is None else s * 3 for s in self.scales]
        generations = (
            segment_descriptors([_segments(t, segments) for t in placed], _addresses(scales), _addresses(self.ranks))
            for placed, scales in ((self.tables, self.scales), (self.other, self.other_scales))
        )
        self.descriptors = descriptors(generations, target, spread, cold_reads)
        self.lookup = DeviceLookup(plan, self.descriptors, out_dtype, once=once, shared=shared)
        self.room = room  # contexts whose shared columns are wanted

    @property
    def out_of_range(self):
        return self.lookup.out_of_range if self.device in ON_CPU else int(self.descriptors.out_of_range.item())

    def __call__(self, batch, rows, capacity=None, generation=0, ahead=False, contexts=None):
        """contexts: that the batch tells of; by default as many as it has."""
        if self.device in ON_CPU:
            return self.lookup(in_records(self.plan, batch), rows)
        capacity = capacity or rows
        x = torch.full((capacity, -(-self.plan.x_width // 8) * 8), torch.nan, dtype=self.out_dtype, device=self.memory)
        total = torch.full((capacity, 1), torch.nan, device=self.memory)
        state = lane_state(0, self.memory, batch_number=5, generation=generation)
        pinned = on_the_bus(self.plan, batch, self.carries)
        self.context_rows = (
            torch.full((capacity,), -1, dtype=torch.int32, device=self.memory)
            if self.lookup.once or self.lookup.shared
            else None
        )
        self.shared_x = None
        if self.lookup.shared:
            first, end = self.lookup.shared
            self.shared_x = torch.full((self.room, end - first), torch.nan, dtype=self.out_dtype, device=self.memory)
        self.lookup(
            pinned, capacity, x, total, state, context_rows=self.context_rows, shared_x=self.shared_x, ahead=ahead
        )  # fmt: skip
        want = lane_state(rows, self.memory, batch_number=6, generation=generation)
        want[StateWord.CONTEXTS] = (contexts or len(batch.context_ids)) if self.lookup.shared or self.lookup.once else 0
        assert torch.equal(state, want)
        self.padding = x[rows:].cpu(), total[rows:].cpu()
        return x[:rows, : self.plan.x_width].cpu(), total[:rows].cpu()


def ranks_of(table, seed):
    """The place of each row among the rows, any order of them."""
    return torch.from_numpy(np.random.default_rng(seed).permutation(len(table)).astype(np.int32))


def by_rank(table, ranks):
    if ranks is None:
        return table
    placed = torch.empty_like(table)
    placed[ranks.long()] = table
    return placed


def _addresses(tensors):
    return [0 if t is None else t.data_ptr() for t in tensors]


def _segments(table, count):
    """The table's rows as `count` segments of uneven length that lie where the table lies."""
    ends = sorted({max(1, table.shape[0] * (i + 1) ** 2 // count**2) for i in range(count)})
    begins = [0, *ends[:-1]]
    return [
        Segment(table.data_ptr() + b * table.stride(0) * table.element_size(), e) for b, e in zip(begins, ends, strict=True)
    ]


def mixed_plan(int8=(), width=0):
    """Every kind of slot, odd dims, shared tables, context and candidate sides, bags by sum and mean; `int8` tables."""
    tables = [TableShape(7, 16, F32), TableShape(1, 16, F32), TableShape(130, 3, F32), TableShape(19, 40, F16),
              TableShape(7, 1, F32), TableShape(130, 1, F32), TableShape(5, 10, torch.bfloat16)]  # fmt: skip
    tables = [replace(t, dtype=I8) if i in int8 else t for i, t in enumerate(tables)]
    columns = [
        IdColumn(0, 0, 1), IdColumn(ALWAYS_ROW_0, 1, 0), IdColumn(-1, 2, 3), IdColumn(1, 3, 0, True), IdColumn(2, 3, 0, True),
        IdColumn(3, 3, 0, True), IdColumn(-2, 6, 4, True), IdColumn(-3, 6, 4, True), IdColumn(0, 4, 1), IdColumn(-1, 5, 3),
        IdColumn(4, 0, 1),
    ]  # fmt: skip
    x = [
        Slot(Kind.GATHER, 16, 0, 0, 1), Slot(Kind.SCALE, 16, 16, 1, 1, number=0), Slot(Kind.COPY, 1, 32, number=-1),
        Slot(Kind.GATHER, 3, 33, 2, 1), Slot(Kind.GATHER, 40, 36, 3, 3, mean=True), Slot(Kind.GATHER, 10, 76, 6, 2),
        Slot(Kind.GATHER, 16, 86, 10, 1),
    ]  # fmt: skip
    total = [Slot(Kind.GATHER, 1, 0, 8, 1), Slot(Kind.GATHER, 1, 0, 9, 1), Slot(Kind.COPY, 1, 0, number=1)]
    return plan_of(tables, columns, x, total, 3, 5, context_numbers=1, candidate_numbers=2, width=width)


def some_padding(rng, n, size):
    ids = rng.integers(0, size, n)
    ids[rng.random(n) < 0.4] = -1
    return ids


@pytest.fixture
def on_host(monkeypatch, run_folder):
    """The kernel's own code, run on the host."""
    host_cuda.put_under(monkeypatch, embedding, run_folder)


MIXED = pytest.mark.parametrize("int8", [(), (0, 1, 3, 4), (2, 5, 6), range(7)], ids=["no-int8", "some", "others", "all"])


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(
    ("int8", "width"), [((), 0), ((), 2), ((), 4), ((), 8), ((0, 1, 3, 4), 0), ((2, 5, 6), 0), (range(7), 0), (range(7), 8)]
)
@pytest.mark.parametrize("rows", [1, 2, 19, 127, 128, 129, 1031])
def test_every_kind_of_slot_matches_the_reference(rows, int8, width, device):
    plan = mixed_plan(int8, width)
    tables, batch = tables_of(plan), batch_of(plan, rows, contexts=min(rows, 5), ids=some_padding)
    x, total = OnDevice(plan, tables, device)(batch, rows)
    want_x, want_total = expected(plan, tables, scales_of(plan), batch, rows)
    torch.testing.assert_close(x, want_x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, want_total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("rows", [1, 300])
def test_numbers_alone_are_copied(rows, device):
    slots = [Slot(Kind.COPY, 1, i, number=number) for i, number in enumerate((2, -2, 0, 1, -1))]
    plan = plan_of([], [], slots, context_numbers=2, candidate_numbers=3)
    batch = batch_of(plan, rows, contexts=min(rows, 4))
    x, _ = OnDevice(plan, [], device)(batch, rows)
    of_rows, of_contexts = batch.candidate_numbers[:rows], batch.context_numbers[batch.request_of_row[:rows].long()]
    assert torch.equal(x, torch.cat([of_rows, of_contexts], 1)[:, [2, 4, 0, 1, 3]])


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("dtype", [F32, F16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 8, 16, 20, 128, 1030])
@pytest.mark.parametrize("rows", [53, 1400])
def test_one_hot_gathers_are_bit_equal(rows, dim, dtype, device):
    shapes = [TableShape(rows, dim, dtype) for rows in (1, 2, 97)]
    columns = [IdColumn(i, i, 0) for i in range(3)]
    plan = plan_of(shapes, columns, [Slot(Kind.GATHER, dim, i * dim, i, 1) for i in range(3)], candidate=3)
    tables, batch = tables_of(plan), batch_of(plan, rows)
    x, _ = OnDevice(plan, tables, device)(batch, rows)
    want = torch.cat([t[batch.candidate_ids[:, i].long()].float() for i, t in enumerate(tables)], 1)
    assert torch.equal(x, want)


INT8_DIMS = [1, 3, 4, 8, 10, 16, 40]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("out_dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize("other", [None, F32, F16])
@pytest.mark.parametrize("dim", INT8_DIMS)
def test_int8_rows_come_out_times_the_scale_of_their_column(dim, other, device, out_dtype):
    """To the bit, alone and beside tables of another dtype."""
    shapes = [TableShape(rows, dim, I8) for rows in (1, 2, 97)] + ([TableShape(9, dim, other)] if other else [])
    columns = [IdColumn(i, i, 0) for i in range(len(shapes))]
    plan = plan_of(shapes, columns, [Slot(Kind.GATHER, dim, i * dim, i, 1) for i in range(len(shapes))], candidate=4)
    tables, scales, batch = tables_of(plan), scales_of(plan), batch_of(plan, 53)
    x, _ = OnDevice(plan, tables, device, out_dtype)(batch, 53)
    rows = [t[batch.candidate_ids[:, i].long()].float() for i, t in enumerate(tables)]
    want = torch.cat([r if s is None else r * s for r, s in zip(rows, scales, strict=True)], 1)
    assert torch.equal(x, want.to(out_dtype))


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("dim", INT8_DIMS)
def test_int8_bags_are_pooled_as_their_values_are(dim, mean, device):
    columns = [IdColumn(i, 0, 2, True) for i in range(5)]
    slot = Slot(Kind.GATHER, dim, 0, 0, 5, mean=mean)
    plan = plan_of([TableShape(31, dim, I8)], columns, [slot], candidate=5)
    tables, batch = tables_of(plan), batch_of(plan, 70, ids=some_padding)
    x, _ = OnDevice(plan, tables, device)(batch, 70)
    want, _ = expected(plan, tables, scales_of(plan), batch, 70)
    torch.testing.assert_close(x, want, rtol=1e-6, atol=2e-6)


def test_the_reference_takes_int8_tables_with_their_scales():
    plan = mixed_plan(range(7))
    tables, batch = tables_of(plan), batch_of(plan, 40, contexts=3, ids=some_padding)
    got = reference.lookup(plan, tables, batch, 40, scales_of(plan))
    torch.testing.assert_close(got, expected(plan, tables, scales_of(plan), batch, 40), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", WHERE)
def test_each_column_reads_its_own_table(device):
    """Table i holds the value i everywhere: an oracle that needs no arithmetic."""
    shapes = [TableShape(3 + i, 8, F32) for i in range(41)]
    columns = [IdColumn(40 - i, i, 0) for i in range(41)]
    plan = plan_of(shapes, columns, [Slot(Kind.GATHER, 8, i * 8, i, 1) for i in range(41)], candidate=41)
    tables = [torch.full((t.rows, t.dim), float(i)) for i, t in enumerate(shapes)]
    x, _ = OnDevice(plan, tables, device)(batch_of(plan, 5), 5)
    assert torch.equal(x, torch.arange(41.0).repeat_interleave(8).expand(5, -1))


WILD = [(width, bad) for width in (1, 2, 4, 8) for bad in (-1, 10, 2 ** (8 * width - 1) - 1, -(2 ** (8 * width - 1)))]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(("width", "bad"), WILD)
def test_an_id_outside_its_table_reads_the_oov_row_and_is_counted(width, bad, device):
    plan = plan_of([TableShape(10, 4, F32)], [IdColumn(0, 0, 7)], [Slot(Kind.GATHER, 4, 0, 0, 1)], candidate=1, width=width)
    tables = tables_of(plan)
    lookup = OnDevice(plan, tables, device)
    x, _ = lookup(batch_of(plan, 6, ids=lambda rng, n, size: np.full(n, bad)), 6)
    assert torch.equal(x, tables[0][7].expand(6, -1))
    assert lookup.out_of_range == 6


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_an_empty_bag_is_a_zero_vector_and_counts_nothing(width, device):
    columns = [IdColumn(i, 0, 0, True) for i in range(4)]
    slots = [Slot(Kind.GATHER, 4, 0, 0, 2, mean=True), Slot(Kind.GATHER, 4, 4, 2, 2)]
    plan = plan_of([TableShape(5, 4, F32)], columns, slots, candidate=4, width=width)
    lookup = OnDevice(plan, tables_of(plan), device)
    x, _ = lookup(batch_of(plan, 3, ids=lambda rng, n, size: np.full(n, -1)), 3)
    assert torch.equal(x, torch.zeros(3, 8))
    assert lookup.out_of_range == 0


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(255, 1), (256, 2), (65535, 2), (65536, 4)])
def test_the_last_row_of_a_table_is_no_padding(rows, width, context, device):
    """Three bags of the largest id, or of a row before it, and padding, behind a column that shifts them in their record."""
    columns = [IdColumn(-1 - i if context else i, 0 if i else 1, 0, bool(i)) for i in range(7)]
    slots = [Slot(Kind.GATHER, 4, 0, 0, 1), *(Slot(Kind.GATHER, 4, 4 + 4 * b, 1 + 2 * b, 2, mean=True) for b in range(3))]
    side = {"context": 7} if context else {"candidate": 7}
    plan = plan_of([TableShape(rows, 4, F32), TableShape(9, 4, F32)], columns, slots, **side)
    assert (plan.context_ids if context else plan.candidate_ids).widths == (1, *[width] * 6)
    ids = iter([[8], [rows - 1], [-1], [-1], [rows - 2], [rows - 1], [rows - 1]])
    lookup = OnDevice(plan, tables := tables_of(plan), device)
    x, _ = lookup(batch_of(plan, 5, ids=lambda rng, n, size: np.full(n, next(ids))), 5)
    want = torch.cat([tables[1][8], tables[0][rows - 1], tables[0][rows - 2], tables[0][rows - 1]])
    assert torch.equal(x, want.expand(5, -1))
    assert lookup.out_of_range == 0


@pytest.mark.parametrize("device", WHERE)
def test_two_tables_of_one_column_bound_its_ids_each_for_itself(device):
    columns = [IdColumn(0, 0, 0), IdColumn(0, 1, 2)]
    slots = [Slot(Kind.GATHER, 4, 0, 0, 1)], [Slot(Kind.GATHER, 1, 0, 1, 1)]
    plan = plan_of([TableShape(300, 4, F32), TableShape(255, 1, F32)], columns, *slots, candidate=1)
    tables, ids = tables_of(plan), np.array([0, 254, 255, 299, 300])
    lookup = OnDevice(plan, tables, device)
    x, total = lookup(batch_of(plan, 5, ids=lambda rng, n, size: ids), 5)
    assert torch.equal(x, tables[0][[0, 254, 255, 299, 0]])
    assert torch.equal(total, tables[1][[0, 254, 2, 2, 2]])
    assert lookup.out_of_range == 1 + 3


def test_a_column_too_narrow_for_its_table_is_refused():
    with pytest.raises(
        ValueError, match=r"got 1 bytes an id for .*, expected one width for a slot, and 2 or more for 256 rows"
    ):
        plan_of([TableShape(256, 4, F32)], [IdColumn(0, 0, 0)], [Slot(Kind.GATHER, 4, 0, 0, 1)], candidate=1, width=1)


def sequence_plan(context, width=0, dtype=F32, dim=3):
    """Two sequences of 3 ids of one table side by side and their masks, behind a column that shifts them in their record."""
    columns = [IdColumn(-1 - i if context else i, 0 if i else 1, 1, bool(i)) for i in range(7)]
    of_mask = [replace(c, oov=2) for c in columns[1:]]
    slots = [Slot(Kind.GATHER, 1, 0, 0, 1), *(Slot(Kind.GATHER, dim, 1 + dim * i, 1 + i, 1) for i in range(6))]
    slots += [Slot(Kind.MASK, 1, 1 + 6 * dim + i, 7 + i, 1) for i in range(6)]
    tables = [TableShape(200, dim, dtype), TableShape(9, 1, F32)]
    return plan_of(tables, [*columns, *of_mask], slots, **{"context" if context else "candidate": 7}, width=width)


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("dtype", [F32, I8])
@pytest.mark.parametrize("width", [0, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 53])
def test_a_sequence_is_rows_side_by_side_and_its_mask_tells_ids_from_padding(rows, width, dtype, context, device):
    plan = sequence_plan(context, width, dtype)
    tables, batch = tables_of(plan), batch_of(plan, rows, contexts=min(rows, 5), ids=some_padding)
    batch.context_ids[:, :1].clamp_(min=0)
    batch.candidate_ids[:, :1].clamp_(min=0)
    lookup = OnDevice(plan, tables, device)
    x, _ = lookup(batch, rows)
    ids = batch.context_ids[batch.request_of_row[:rows].long()] if context else batch.candidate_ids[:rows]
    ids = ids[:, 1:].long()
    assert torch.equal(x[:, -6:], (ids >= 0).float())
    scale = scales_of(plan)[0]
    values = tables[0].float() if scale is None else tables[0].float() * scale
    want = torch.where((ids >= 0)[:, :, None], values[ids], 0.0)
    assert torch.equal(x[:, 1:-6].view(rows, 6, -1), want)
    assert torch.equal(x, reference.lookup(plan, tables, batch, rows, scales_of(plan))[0])
    assert lookup.out_of_range == 0


@pytest.mark.parametrize("device", BACKENDS[1:])
@pytest.mark.parametrize("dtype", [F32, I8])
@pytest.mark.parametrize(("rows", "contexts"), [(1, 1), (1, 4), (5, 8), (53, 1), (53, 5), (300, 290), (1031, 4)])
def test_columns_of_a_context_are_written_once_where_they_are_wanted_once(rows, contexts, dtype, device):
    plan = sequence_plan(True, dtype=dtype)
    tables = tables_of(plan)
    batch = batch_of(plan, rows, contexts, lambda rng, n, size: rng.integers(-1, size + 2, n), capacity=rows + 3)
    plain, once = OnDevice(plan, tables, device), OnDevice(plan, tables, device, once=((1, 19), (19, 25)))
    every, _ = plain(batch, rows, capacity=rows + 3)
    x, _ = once(batch, rows, capacity=rows + 3)
    request, own = batch.request_of_row[:rows].long(), once.context_rows.cpu()
    assert torch.equal(x[:, :1], every[:, :1])
    assert torch.equal(own[:rows].long(), request)
    assert (own[rows:] == -1).all()
    x = torch.cat([x, once.padding[0][:, : plan.x_width]])  # contexts may be more than rows
    assert torch.equal(x[request, 1:25], every[:, 1:25])
    assert x[contexts:, 1:25].isnan().all()
    outside = batch.context_ids >= torch.tensor([plan.tables[plan.columns[i].table].rows for i in range(7)])
    outside[:, 0] |= batch.context_ids[:, 0] < 0  # of which -1 is no padding
    assert once.out_of_range == outside[request, 0].sum() + outside[:, 1:].sum()
    assert once.out_of_range or rows == 1


def context_plan(dtype=F32):
    """Columns 0 to 16 of a candidate's id, 16 to 64 of the context: an id, a bag of two, a number times a row, numbers."""
    tables = [TableShape(70, 16, dtype), TableShape(9, 8, dtype), TableShape(1, 8, F32), TableShape(300, 8, dtype)]
    columns = [IdColumn(0, 0, 1), IdColumn(-1, 0, 1), IdColumn(-2, 1, 3, True), IdColumn(-3, 1, 3, True)]
    columns += [IdColumn(ALWAYS_ROW_0, 2, 0), IdColumn(1, 3, 2)]
    x = [Slot(Kind.GATHER, 16, 0, 0, 1), Slot(Kind.GATHER, 16, 16, 1, 1), Slot(Kind.GATHER, 8, 32, 2, 2)]
    x += [Slot(Kind.SCALE, 8, 40, 4, 1, number=-1), *(Slot(Kind.COPY, 1, 48 + i, number=-1 - i) for i in range(8))]
    x += [Slot(Kind.COPY, 1, 56 + i, number=-1 - i) for i in range(8)] + [Slot(Kind.GATHER, 8, 64, 5, 1)]
    return plan_of(tables, columns, x, context=3, candidate=2, context_numbers=8)


@pytest.mark.parametrize("device", BACKENDS[1:])
@pytest.mark.parametrize(("dtype", "out"), [(F32, F32), (F16, torch.bfloat16), (I8, F32)])
@pytest.mark.parametrize(("rows", "contexts"), [(1, 1), (53, 1), (53, 5), (300, 290), (1031, 3)])
def test_columns_of_a_context_are_written_for_each_context_too(rows, contexts, dtype, out, device):
    plan = context_plan(dtype)
    tables = tables_of(plan)
    batch = batch_of(plan, rows, contexts, lambda rng, n, size: rng.integers(0, size + 2, n), capacity=rows + 3)
    plain, shared = OnDevice(plan, tables, device, out), OnDevice(plan, tables, device, out, shared=(16, 64), room=4)
    every, _ = plain(batch, rows, capacity=rows + 3)
    x, _ = shared(batch, rows, capacity=rows + 3)
    assert torch.equal(x, every)
    request, own = batch.request_of_row[:rows], shared.context_rows.cpu()
    assert torch.equal(own[:rows], request)
    assert (own[rows:] == -1).all()
    got = shared.shared_x.cpu()
    for context in range(4):
        rows_of = (request == context).nonzero()[:, 0]
        if len(rows_of):
            assert torch.equal(got[context], every[rows_of[0], 16:64])
        else:
            assert got[context].isnan().all()
    assert shared.out_of_range == plain.out_of_range


@pytest.mark.bulk
def test_on_the_host_too_columns_are_written_for_each_context(on_host):
    for rows, contexts in ((1, 1), (53, 1), (53, 5), (300, 290)):
        test_columns_of_a_context_are_written_for_each_context_too(rows, contexts, F16, torch.bfloat16, "host")


def test_room_for_the_columns_of_contexts_is_asked_for(on_host):
    plan = context_plan()
    lookup = OnDevice(plan, tables_of(plan), "host", shared=(16, 64)).lookup
    batch, state = on_the_bus(plan, batch_of(plan, 2)), torch.zeros(STATE_WORDS, dtype=torch.int32)
    given = batch, 2, torch.zeros(2, 72), None, state
    for shared_x in (None, torch.zeros(3, 47), torch.zeros(3, 48, dtype=torch.bfloat16), torch.zeros(3, 96)[:, ::2]):
        got = "None" if shared_x is None else re.escape(f"{shared_x.dtype} {tuple(shared_x.shape)}")
        expected = rf"lookup shared x: got {got}, expected contiguous torch.float32 \[contexts, 48\]"
        with pytest.raises(ValueError, match=expected):
            lookup(*given, context_rows=torch.zeros(2, dtype=torch.int32), shared_x=shared_x)


@pytest.mark.parametrize("device", WHERE)
def test_an_id_outside_its_table_is_an_id_to_the_mask(device):
    plan = sequence_plan(False)
    lookup = OnDevice(plan, tables := tables_of(plan), device)
    x, _ = lookup(batch_of(plan, 4, ids=lambda rng, n, size: np.full(n, 8 if size == 9 else 200)), 4)
    assert torch.equal(x[:, -6:], torch.ones(4, 6))
    assert torch.equal(x[:, 1:4], tables[0][1].expand(4, -1))
    assert lookup.out_of_range == 4 * 6


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("dtype", [F32, F16, I8])
@pytest.mark.parametrize("dim", [1, 3, 4, 16])
@pytest.mark.parametrize("rows", [2, 70])
def test_bags_are_pooled_by_max_and_empty_ones_are_zero(rows, dim, dtype, device):
    columns = [IdColumn(i, 0, 2, True) for i in range(7)]
    other = [IdColumn(i, 1, 2, True) for i in range(7)]
    slots = [Slot(Kind.GATHER, dim, 0, 0, 5, largest=True), Slot(Kind.GATHER, dim, dim, 5, 2, mean=True)]
    total = [Slot(Kind.GATHER, 1, 0, 7, 5, largest=True), Slot(Kind.GATHER, 1, 0, 12, 2, largest=True)]
    shapes = [TableShape(31, dim, dtype), TableShape(31, 1, F32)]
    plan = plan_of(shapes, [*columns, *other], slots, total, candidate=7)
    tables, batch = tables_of(plan), batch_of(plan, rows, ids=some_padding)
    tables = [-t.abs() if t.dtype != I8 else t.clamp(max=-1) for t in tables]  # a zero among the maxima would win
    batch.candidate_ids[0] = -1
    x, sums = OnDevice(plan, tables, device)(batch, rows)
    scale, ids = scales_of(plan)[0], batch.candidate_ids.long()
    values = tables[0].float() if scale is None else tables[0].float() * scale

    def largest(values, ids):
        known = values[ids].masked_fill((ids < 0)[:, :, None], -torch.inf).amax(1)
        return torch.where((ids >= 0).any(1, keepdim=True), known, 0.0)

    assert torch.equal(x[:, :dim], largest(values, ids[:, :5]))
    assert torch.equal(x[0], torch.zeros(2 * dim))
    want_x, want_sums = expected(plan, tables, scales_of(plan), batch, rows)
    torch.testing.assert_close(x, want_x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums, want_sums, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums, largest(tables[1], ids[:, :5]) + largest(tables[1], ids[:, 5:]), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_columns_between_two_outputs_are_left_alone():
    plan = plan_of(
        [TableShape(9, 3, F32)], [IdColumn(0, 0, 0), IdColumn(1, 0, 0)],
        [Slot(Kind.GATHER, 3, 0, 0, 1), Slot(Kind.GATHER, 3, 8, 1, 1)], candidate=2,
    )  # fmt: skip
    x, _ = OnDevice(plan, tables_of(plan), "cuda:0")(batch_of(plan, 5), 5)
    assert torch.isnan(x[:, 3:8]).all()
    assert not torch.isnan(x[:, [0, 1, 2, 8, 9, 10]]).any()


@pytest.mark.gpu
@MIXED
@pytest.mark.parametrize("segments", [2, 3, 7])
def test_a_table_in_several_segments_reads_as_one(segments, int8):
    plan = mixed_plan(int8)
    tables, batch = tables_of(plan), batch_of(plan, 200, contexts=9, ids=some_padding)
    x, total = OnDevice(plan, tables, "cuda:0", segments=segments)(batch, 200)
    want_x, want_total = OnDevice(plan, tables, "cuda:0")(batch, 200)
    assert torch.equal(x, want_x)
    assert torch.equal(total, want_total)


@pytest.mark.covering(1)
@MIXED
@pytest.mark.parametrize("device", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("segments", [1, 4])
def test_rows_that_lie_by_their_ranks_read_as_if_they_lay_by_their_ids(segments, device, int8, request):
    if device == "host":
        request.getfixturevalue("on_host")
    plan = mixed_plan(int8)
    tables, batch = tables_of(plan), batch_of(plan, 60, contexts=9, ids=lambda rng, n, size: rng.integers(-1, size + 2, n))
    plain, placed = (OnDevice(plan, tables, device, segments=1 if not ranked else segments, ranked=ranked)
                     for ranked in (False, True))  # fmt: skip
    (x, total), (want_x, want_total) = placed(batch, 60), plain(batch, 60)
    assert (placed.descriptors.tiers, plain.descriptors.tiers) == (True, False)
    assert torch.equal(x, want_x)
    assert torch.equal(total, want_total)
    assert placed.out_of_range == plain.out_of_range > 0


@pytest.mark.gpu
@MIXED
@pytest.mark.parametrize("segments", [1, 3])
def test_the_generation_of_a_lane_picks_the_descriptors(segments, int8):
    plan = mixed_plan(int8)
    batch = batch_of(plan, 90, contexts=4, ids=some_padding)
    lookup = OnDevice(plan, tables_of(plan), "cuda:0", segments=segments)
    for generation in (1, 0, 1):
        x, _ = lookup(batch, 90, generation=generation)
        pairs = ((lookup.tables, lookup.scales), (lookup.other, lookup.other_scales))[generation]
        tables, scales = ([None if t is None else t.cpu() for t in kind] for kind in pairs)
        want, _ = expected(plan, tables, scales, batch, 90)
        torch.testing.assert_close(x, want, rtol=1e-6, atol=2e-6)


@pytest.mark.gpu
@MIXED
@pytest.mark.parametrize(("segments", "device"), [(1, "cuda:0"), (3, "cuda:0")])
def test_tables_that_moved_are_read_where_they_are_once_they_are_placed(segments, int8, device):
    plan = mixed_plan(int8)
    batch = batch_of(plan, 20, contexts=4, ids=some_padding)
    lookup = OnDevice(plan, tables_of(plan), device, segments=segments)
    second, _ = lookup(batch, 20, generation=1)
    for image in (lookup.descriptors.tables, lookup.descriptors.segments):
        image[: len(image) // 2] = image[len(image) // 2 :].clone()
    lookup.lookup.place()
    x, _ = lookup(batch, 20)
    torch.testing.assert_close(x, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_padding_rows_are_not_written():
    plan = mixed_plan()
    lookup = OnDevice(plan, tables_of(plan), "cuda:0")
    lookup(batch_of(plan, 21, contexts=2, capacity=64), 21, capacity=64)
    assert all(torch.isnan(t).all() for t in lookup.padding)


@MIXED
@pytest.mark.parametrize("device", WHERE)
def test_bfloat16_output_is_the_float32_output_rounded(device, int8):
    plan = mixed_plan(int8)
    tables, batch = tables_of(plan), batch_of(plan, 77, contexts=3)
    x, _ = OnDevice(plan, tables, device, out_dtype=torch.bfloat16)(batch, 77)
    want, _ = OnDevice(plan, tables, device)(batch, 77)
    assert torch.equal(x, want.bfloat16())


@pytest.mark.parametrize("rows", [1, 5, 700])
@pytest.mark.parametrize("dim", [1, 10, 16])
def test_int8_rows_times_their_scales_are_exact(dim, rows):
    shapes = [TableShape(n, dim, torch.int8) for n in (1, 40, 97)] + [TableShape(11, dim, F32)]
    slots = [Slot(Kind.GATHER, dim, i * dim, i, 1) for i in range(4)]
    plan = plan_of(shapes, [IdColumn(i, i, 0) for i in range(4)], slots, candidate=4)
    generator = torch.Generator().manual_seed(2)
    tables = [torch.randint(-128, 128, (t.rows, dim), generator=generator).to(t.dtype) for t in shapes]
    scales = [None if t.dtype == F32 else torch.rand(dim, generator=generator) for t in shapes]
    batch = batch_of(plan, rows)
    x, _ = PackedLookup(plan, tables, scales)(in_records(plan, batch), rows)
    read = [t[batch.candidate_ids[:, i].long()].float() for i, t in enumerate(tables)]
    assert torch.equal(x, torch.cat([r if s is None else r * s for r, s in zip(read, scales, strict=True)], 1))


@pytest.mark.parametrize("rows", [1, 19, 300])
def test_int8_tables_read_as_their_float32_values_in_every_kind_of_slot(rows):
    plan = mixed_plan()
    small = replace(plan, tables=tuple(replace(t, dtype=torch.int8) for t in plan.tables))
    generator = torch.Generator().manual_seed(3)
    tables = [torch.randint(-128, 128, (t.rows, t.dim), generator=generator, dtype=torch.int8) for t in small.tables]
    scales = [torch.rand(t.dim, generator=generator) / 64 for t in small.tables]
    batch = batch_of(plan, rows, contexts=min(rows, 5), ids=some_padding)
    lookup = PackedLookup(small, tables, scales)
    wide = [t.float() * s for t, s in zip(tables, scales, strict=True)]
    want_x, want_total = reference.lookup(plan, wide, batch, rows)
    x, total = lookup(in_records(small, batch), rows)
    torch.testing.assert_close(x, want_x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, want_total, rtol=1e-6, atol=1e-6)
    kept = {group.weight.dtype for group in (*lookup._x_groups, *lookup._total_groups)}
    assert kept == {torch.int8}


@pytest.mark.parametrize("width", [2, 4, 8])
def test_ids_of_any_width_read_the_same_rows_on_a_cpu(width):
    plan, wider = mixed_plan(), mixed_plan(width=width)
    tables = tables_of(plan)
    batch = batch_of(plan, 40, contexts=3, ids=some_padding)
    for narrow, wide in zip(OnDevice(plan, tables, "cpu")(batch, 40), OnDevice(wider, tables, "cpu")(batch, 40), strict=True):
        assert torch.equal(narrow, wide)


@pytest.mark.parametrize("device", WHERE)
def test_a_bad_id_is_counted_once_for_each_table_that_it_feeds(device):
    """An embedding and a first-order weight, whose tables have equal rows, and a second embedding."""
    shapes = [TableShape(10, 4, F32), TableShape(10, 1, F32), TableShape(10, 3, F32)]
    columns = [IdColumn(0, 0, 7), IdColumn(0, 2, 6), IdColumn(0, 1, 5)]
    x_slots = [Slot(Kind.GATHER, 4, 0, 0, 1), Slot(Kind.GATHER, 3, 4, 1, 1)]
    plan = plan_of(shapes, columns, x_slots, [Slot(Kind.GATHER, 1, 0, 2, 1)], candidate=1)
    tables = tables_of(plan)
    lookup = OnDevice(plan, tables, device)
    x, total = lookup(batch_of(plan, 6, ids=lambda rng, n, size: np.full(n, 10)), 6)
    assert torch.equal(x, torch.cat([tables[0][7], tables[2][6]]).expand(6, -1))
    assert torch.equal(total, tables[1][5].expand(6, 1))
    assert lookup.out_of_range == 18


@pytest.mark.gpu
@pytest.mark.slow
def test_rows_past_two_to_the_31_elements_are_reached():
    rows = 2**31 // 64 + 5
    plan = plan_of([TableShape(rows, 64, F16)], [IdColumn(0, 0, 0)], [Slot(Kind.GATHER, 64, 0, 0, 1)], candidate=1)
    table = torch.zeros(rows, 64, dtype=F16, device="cuda:0")
    table[-1] = 3
    batch = batch_of(plan, 2, ids=lambda rng, n, size: np.full(n, rows - 1))
    x, _ = OnDevice(plan, [table], "cuda:0")(batch, 2)
    assert torch.equal(x, torch.full((2, 64), 3.0))


@pytest.mark.gpu
def test_a_batch_of_another_plan_is_refused_before_the_launch():
    plan = mixed_plan()
    lookup = OnDevice(plan, tables_of(plan), "cuda:0")
    message = r"lookup context ids: got torch.int32 \(1, 3\), expected contiguous torch.uint8 \[\*, 4\]"
    with pytest.raises(ValueError, match=message):
        lookup.lookup(batch_of(plan, 4), 4, None, None, None)


def test_segments_that_do_not_ascend_are_refused():
    with pytest.raises(ValueError, match=r"table 0: got segment ends \[5, 5\]"):
        segment_descriptors([[Segment(0, 5), Segment(64, 5)]])


@pytest.mark.parametrize("rows", [0, 9])
def test_rows_that_no_segment_holds_are_refused(rows):
    with pytest.raises(ValueError, match=rf"table 0: got {rows} rows, expected 1 to 8, as many as its segments hold"):
        segment_descriptors([[Segment(0, 5), Segment(64, 8)]], rows=[rows])


@pytest.mark.bulk
@pytest.mark.parametrize("int8", [(), (0, 1, 3, 4), range(7)], ids=["no-int8", "some", "all"])
def test_on_the_host_too_the_kernel_matches_the_reference(on_host, int8):
    for width, rows in ((0, 1), (0, 19), (8, 129)):
        test_every_kind_of_slot_matches_the_reference(rows, int8, width, "host")


@pytest.mark.bulk
@pytest.mark.parametrize(("dim", "dtype"), [(1, F32), (16, F32), (16, F16), (20, torch.bfloat16)])
def test_on_the_host_too_one_hot_gathers_are_bit_equal(on_host, dim, dtype):
    test_one_hot_gathers_are_bit_equal(53, dim, dtype, "host")


@MIXED
def test_whole_tables_are_one_segment_in_both_generations(on_host, int8):
    lookup = OnDevice(mixed_plan(int8), tables_of(mixed_plan(int8)), "host")
    found, first = whole(lookup.tables, lookup.scales, torch.device("cpu")), lookup.descriptors
    for image, other in ((found.tables, first.tables), (found.segments, first.segments)):
        half = len(other) // 2
        assert torch.equal(image, torch.cat([other[:half]] * 2))
    assert (found.n_tables, found.n_segments) == (len(lookup.tables), len(lookup.tables))
    assert whole([], [], torch.device("cpu")).n_tables == 0


@pytest.mark.bulk
@MIXED
def test_on_the_host_too_tables_that_moved_are_read_where_they_are(on_host, int8):
    test_tables_that_moved_are_read_where_they_are_once_they_are_placed(3, int8, "host")


@pytest.mark.bulk
def test_on_the_host_too_numbers_alone_are_copied(on_host):
    test_numbers_alone_are_copied(300, "host")


@pytest.mark.bulk
def test_on_the_host_too_an_id_outside_its_table_reads_the_oov_row_and_is_counted(on_host):
    for width, bad in WILD:
        test_an_id_outside_its_table_reads_the_oov_row_and_is_counted(width, bad, "host")


@pytest.mark.bulk
def test_on_the_host_too_columns_of_a_context_are_written_once(on_host):
    for rows, contexts in ((1, 1), (53, 1), (53, 5), (300, 290)):
        test_columns_of_a_context_are_written_once_where_they_are_wanted_once(rows, contexts, F32, "host")


def test_context_rows_are_asked_for(on_host):
    plan = sequence_plan(True)
    lookup = OnDevice(plan, tables_of(plan), "host", once=((1, 19),)).lookup
    batch = on_the_bus(plan, batch_of(plan, 2))
    with pytest.raises(ValueError, match=r"lookup context rows: got None, expected int32\[>= 2\]"):
        lookup(batch, 2, torch.zeros(2, 32), torch.zeros(2, 1), torch.zeros(STATE_WORDS, dtype=torch.int32))


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_lookup_compiles_ahead_is_what_its_launches_ask_for(on_host, monkeypatch, ahead):
    asked: list[KernelSource] = []
    monkeypatch.setattr(embedding, "loaded", asked.append)
    monkeypatch.setattr(embedding, "launch", lambda *_, **__: None)
    plan, buckets = mixed_plan(), (1, 64, 512, 1024, 4096)
    host = OnDevice(plan, tables_of(plan), "host")
    compiled, rows = {host.lookup.source(bucket, pinned=True, ahead=ahead) for bucket in buckets}, buckets[-1]
    assert len(compiled) > 1
    state, x, total = torch.zeros(STATE_WORDS, dtype=torch.int32), torch.zeros(rows, 104), torch.zeros(rows, 1)
    batch = on_the_bus(plan, batch_of(plan, rows))
    for bucket in buckets:
        host.lookup(batch, bucket, x, total, state, ahead=ahead)
    assert set(asked) == compiled
