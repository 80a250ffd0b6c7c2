"""Blocks of rows: joined, cut and read back byte for byte, with ids of every width, and blocks of another layout refused."""

import numpy as np
import pytest

from dpiframe_core.bundle.golden import Golden, golden_from_tensors
from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import BlockLayout, IdSection
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import MISSING, UNKNOWN, RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table
from kernels.lookup.batch_header import HeaderWord
from kernels.lookup.id_record import IdRecord

pytestmark = pytest.mark.usefixtures("both_ways")


def schema_of(**rows: int) -> FeatureSchema:
    """An identity feature a table: of the context if its name starts with q, a bag of up to three if it ends with s."""
    features = [
        Categorical(
            name=name, scope="context" if name[0] == "q" else "candidate", values="int", encoder=Identity(), table=name,
            oov_id=0, missing_id=-1 if name[-1] == "s" else 0, max_values=3 if name[-1] == "s" else 1,
        )
        for name in rows
    ]  # fmt: skip
    number = Numeric(name="number"), Numeric(name="query", scope="context")
    tables = tuple(Table(name=name, rows=n, dim=4) for name, n in rows.items())
    return FeatureSchema(features=(*features, *number), tables=tables)


MIXED = schema_of(a=255, b=256, bags=200, c=70_000, d=65_535, q=300, q_bags=9, e=65_536)
LARGE = schema_of(a=255, huge=2**31, q=70_000)


def random_block(schema: FeatureSchema, rows: int, contexts: int, seed: int) -> RowBlock:
    rng = np.random.default_rng(seed)
    block = RowBlock.allocate(schema.block_layout, rows, contexts)
    block.request_of_row[:] = np.sort(rng.integers(0, contexts, rows))
    for f in schema.features:
        view = block.column(schema.columns[f.name])
        if f.is_id:
            view[:] = rng.integers(-1 if f.max_values > 1 else 0, schema.table(f.name).rows, view.shape)
        else:
            view[:] = rng.standard_normal(view.shape)
    return block


def values(block: RowBlock) -> list[np.ndarray]:
    """Everything a row means, each with its context's part."""
    request = block.request_of_row
    sides = block.wide_ids("candidate_ids"), block.wide_ids("context_ids")[request]
    return [*sides, block.candidate_dense, block.context_dense[request]]


@pytest.mark.parametrize("schema", [MIXED, LARGE])
@pytest.mark.parametrize("rows", [1, 2, 130])
@pytest.mark.parametrize("section", ["context_ids", "candidate_ids"])
def test_marks_give_way_to_the_ids_that_stand_for_them(schema: FeatureSchema, rows: int, section: IdSection) -> None:
    block = random_block(schema, rows, rows, 3)
    before, wide = block.buffer.copy(), block.wide_ids(section).astype(np.int64)
    rng = np.random.default_rng(rows)
    unknown, missing = rng.random(wide.shape) < 0.3, rng.random(wide.shape) < 0.3
    stand_ins = np.array([np.arange(wide.shape[1]) % 9, np.arange(wide.shape[1]) % 7 - 1])
    marked = np.asfortranarray(np.where(missing, MISSING, np.where(unknown, UNKNOWN, wide)))
    assert block.settle_ids(section, marked, stand_ins) == (unknown & ~missing).sum()
    want = np.where(missing, stand_ins[1], np.where(unknown, stand_ins[0], wide))
    np.testing.assert_array_equal(block.wide_ids(section), want)
    block.set_ids(section, wide)
    np.testing.assert_array_equal(block.buffer, before)  # and nothing else was written


def test_a_column_is_as_wide_as_its_table_needs() -> None:
    layout = MIXED.block_layout
    assert layout.candidate_ids == IdRecord((1, 2, 1, 1, 1, 4, 2, 4))
    assert layout.context_ids == IdRecord((2, 1, 1, 1))
    assert (layout.id_dtype, layout.context_dense, layout.candidate_dense) == (np.int32, 1, 1)
    assert LARGE.block_layout.candidate_ids == IdRecord((1, 8))
    assert LARGE.block_layout.context_ids == IdRecord((4,))
    assert LARGE.block_layout.id_dtype == np.int64


@pytest.mark.parametrize(("embedding", "first_order", "width"), [(255, 255, 1), (255, 256, 2), (65_536, 255, 4)])
def test_the_larger_of_two_tables_decides_a_columns_width(embedding: int, first_order: int, width: int) -> None:
    feature = Categorical(name="C", values="int", encoder=Identity(), table="C", first_order_table="W")
    tables = Table(name="C", rows=embedding, dim=4), Table(name="W", rows=first_order, dim=1)
    assert FeatureSchema(features=(feature,), tables=tables).block_layout.candidate_ids.widths == (width,)


def test_a_criteo_row_takes_half_the_bytes() -> None:
    """13 fields of 64 rows, 8 of less than 256, 10 of less than 65,536 and 8 larger ones."""
    sizes = [64] * 13 + [200] * 8 + [5000] * 10 + [10**6] * 8
    layout = schema_of(**{f"c{i}": n for i, n in enumerate(sizes)}).block_layout
    assert layout.candidate_ids.nbytes == 76
    assert layout.offsets(4096, 1)[3] - layout.offsets(4096, 1)[2] == 4096 * 76


@pytest.mark.parametrize("schema", [MIXED, LARGE])
def test_blocks_joined_and_cut_again_hold_the_same_rows(schema: FeatureSchema) -> None:
    blocks = [random_block(schema, rows, contexts, rows) for rows, contexts in ((1, 1), (7, 3), (40, 2))]
    whole = RowBlock.allocate(schema.block_layout, 50, 6)
    assert whole.fill(blocks) == 48
    for got, *want in zip(values(whole.part(0, 48)), *map(values, blocks), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(want))
    at = 0
    for block in blocks:
        for got, want in zip(values(whole.part(at, at + block.rows)), values(block), strict=True):
            np.testing.assert_array_equal(got, want)
        at += block.rows


@pytest.mark.parametrize("schema", [MIXED, LARGE])
@pytest.mark.parametrize("contexts", [1, 2, 40])
def test_a_window_holds_the_rows_of_the_part_and_shares_the_memory_of_the_block(schema: FeatureSchema, contexts: int) -> None:
    block = random_block(schema, 40, contexts, 5)
    for start, stop in ((0, 40), (0, 1), (39, 40), (7, 30)):
        window = block.window(start, stop)
        for got, want in zip(values(window), values(block.part(start, stop)), strict=True):
            np.testing.assert_array_equal(got, want)
        assert np.shares_memory(window.candidate_ids, block.candidate_ids)


@pytest.mark.parametrize("schema", [MIXED, LARGE])
def test_windows_joined_again_are_the_block(schema: FeatureSchema) -> None:
    """A window counts its contexts from the block's first, so the base must come off and the batch's contexts come on."""
    block = random_block(schema, 40, 40, 5)
    whole = RowBlock.allocate(schema.block_layout, 41, 41)
    first = random_block(schema, 1, 1, 6)
    assert whole.fill([first, block.window(0, 13), block.window(13, 40)]) == 41
    for got, *want in zip(values(whole), values(first), values(block), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(want))


def test_a_window_whose_contexts_lie_apart_is_a_copy_with_only_these() -> None:
    block = random_block(MIXED, 40, 9, 5)
    block.request_of_row[:2] = (8, 0)
    window = block.window(0, 2)
    assert (window.contexts, window.request_of_row.tolist()) == (2, [1, 0])
    assert not np.shares_memory(window.candidate_ids, block.candidate_ids)


@pytest.mark.parametrize("rows", [1, 2, 17, 130])
@pytest.mark.parametrize("wrong", [-1, 5, -(2**31), 2**31 - 1])
def test_a_block_with_a_row_of_no_context_of_its_own_is_refused_wherever_that_row_is(rows: int, wrong: int) -> None:
    block = random_block(MIXED, rows, 5, 0)
    block.check(MIXED.block_layout)
    good = block.request_of_row.copy()
    for at in {0, rows // 2, rows - 1}:
        block.request_of_row[at] = wrong
        rest = [int(r) for i, r in enumerate(good) if i != at]
        said = rf"request_of_row: got \[{min([wrong, *rest])}, {max([wrong, *rest])}\], expected within \[0, 5\)"
        with pytest.raises(InputError, match=said):
            block.check(MIXED.block_layout)
        block.request_of_row[at] = good[at]


def test_a_window_with_a_row_of_a_context_before_its_first_is_refused() -> None:
    block = RowBlock.allocate(MIXED.block_layout, 9, 4)
    block.request_of_row[:] = [0, 0, 1, 2, 2, 2, 3, 3, 3]
    first, window = block.window(3, 8), block.window(3, 8)
    assert first.base == 2
    first.check(MIXED.block_layout)
    block.request_of_row[5] = 1
    with pytest.raises(InputError, match=r"request_of_row: got \[-1, 1\], expected within \[0, 2\)"):
        window.check(MIXED.block_layout)


@pytest.mark.parametrize("schema", [MIXED, LARGE])
@pytest.mark.parametrize("writable", [False, True])
def test_a_block_read_from_its_bytes_is_the_block(schema: FeatureSchema, writable: bool) -> None:
    block = random_block(schema, 9, 4, 1)
    data = block.buffer.tobytes()
    again = RowBlock.from_bytes(bytearray(data) if writable else data, schema.block_layout)
    assert again.buffer.tobytes() == data
    for got, want in zip(values(again), values(block), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("widths", [(1, 1, 2), (2, 1, 1), (4, 1, 1), (1, 1)])
def test_a_block_whose_ids_lie_elsewhere_is_refused(widths: tuple[int, ...]) -> None:
    layout = BlockLayout(IdRecord(), IdRecord((1, 2, 1)), 0, 0)
    block = RowBlock.allocate(layout, 2)
    RowBlock.from_bytes(block.buffer, layout)
    with pytest.raises(InputError, match=r"row block header: got \[.*\], expected magic 1146112258 and columns \(0, "):
        RowBlock.from_bytes(block.buffer, BlockLayout(IdRecord(), IdRecord(widths), 0, 0))


def test_a_width_of_the_context_is_not_one_of_the_candidates() -> None:
    block = RowBlock.allocate(BlockLayout(IdRecord((1,)), IdRecord((2,)), 0, 0), 2)
    with pytest.raises(InputError, match="row block header"):
        RowBlock.from_bytes(block.buffer, BlockLayout(IdRecord((2,)), IdRecord((1,)), 0, 0))


def test_a_block_of_the_layout_before_is_refused() -> None:
    block = RowBlock.allocate(MIXED.block_layout, 2)
    block.header[HeaderWord.MAGIC] -= 1
    with pytest.raises(InputError, match="row block header"):
        RowBlock.from_bytes(block.buffer, MIXED.block_layout)


def test_encoded_ids_of_every_width_are_those_given() -> None:
    block = Encoder(MIXED, {}).encode(
        {"a": [254, 0], "b": [255, 1], "bags": [[199, 5], []], "c": [69_999, 2], "d": [65_534, 3], "e": [65_535, 4],
         "number": [0.5, 1.5]},
        {"q": 299, "q_bags": [8], "query": 2.0},
    )  # fmt: skip
    assert block.wide_ids("candidate_ids").tolist() == [
        [254, 255, 199, 5, -1, 69_999, 65_534, 65_535],
        [0, 1, -1, -1, -1, 2, 3, 4],
    ]
    assert block.wide_ids("context_ids").tolist() == [[299, 8, -1, -1]]
    assert block.column(MIXED.columns["bags"]).tolist() == [[199, 5, 255], [255] * 3]
    assert block.oov_count == 0


@pytest.mark.parametrize(("schema", "dtype"), [(MIXED, "torch.int32"), (LARGE, "torch.int64")])
def test_golden_rows_are_stored_widened(schema: FeatureSchema, dtype: str) -> None:
    golden = Golden(random_block(schema, 6, 2, 3), np.full((6, 1), 0.5, np.float32))
    tensors = golden.tensors()
    assert {str(tensors[name].dtype) for name in ("context_ids", "candidate_ids")} == {dtype}
    np.testing.assert_array_equal(tensors["candidate_ids"].numpy(), golden.block.wide_ids("candidate_ids"))
    again = golden_from_tensors(tensors, schema, 6, 1)
    assert again.block.buffer.tobytes() == golden.block.buffer.tobytes()
