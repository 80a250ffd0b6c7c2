"""Counts of reads are those of a plain loop over every id that the lookup reads."""

import numpy as np
import pytest

from dpiframe_core.embedding.row_counts import RowCounts, count_rows, zipf_counts
from dpiframe_core.errors import InputError
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table
from tests import oracle
from tests.dpiframe_core.embedding.plan_schema import counts_of, schema_of

SCHEMA = oracle.make_schema(bags=2, plain_numbers=1)


def counted_plainly(schema, blocks):
    found = {t.name: [0] * t.rows for t in schema.tables}
    for block in blocks:
        sections = {s: block.wide_ids(s).tolist() for s in ("context_ids", "candidate_ids")}
        for row in range(block.rows):
            for f in schema.features:
                place, at = schema.columns[f.name], int(block.request_of_row[row])
                for table in (f.table, f.first_order_table):
                    if table is None:
                        continue
                    if not f.is_id:
                        found[table][0] += 1
                        continue
                    ids = sections[place.section][at if place.section == "context_ids" else row]
                    for i in ids[place.start : place.start + place.width]:
                        if i == -1 and f.max_values > 1:
                            continue
                        found[table][i if 0 <= i < len(found[table]) else f.oov_id or 0] += 1
    return found


def test_every_id_that_a_row_reads_counts_once():
    rng = np.random.default_rng(5)
    blocks = [oracle.make_block(SCHEMA, rows, contexts, rng, wild=wild)
              for rows, contexts, wild in ((30, 4, False), (7, 1, True), (9, 9, True))]  # fmt: skip
    blocks.append(blocks[0].window(11, 23))
    assert blocks[-1].base > 0
    got, want = count_rows(SCHEMA, blocks), counted_plainly(SCHEMA, blocks)
    assert got.rows == 30 + 7 + 9 + 12
    assert {name: own.tolist() for name, own in got.tables.items()} == want
    got.check(SCHEMA)


def test_a_contexts_id_counts_for_each_of_its_rows_and_an_illegal_one_for_the_row_read_instead():
    schema = FeatureSchema(
        features=(
            Categorical(name="user", scope="context", values="int", encoder=Identity(), table="u", oov_id=2),
            Categorical(name="item", values="int", encoder=Identity(), table="i", max_values=2, missing_id=-1, oov_id=1),
            Numeric(name="price", table="p", missing_value=0.0),
        ),
        tables=(Table(name="u", rows=4, dim=2), Table(name="i", rows=3, dim=2), Table(name="p", rows=1, dim=2)),
    )
    block = RowBlock.allocate(schema.block_layout, 5, 2)
    block.request_of_row[:] = [0, 0, 0, 1, 1]
    block.column(schema.columns["user"])[:] = [[3], [77]]
    block.column(schema.columns["item"])[:] = np.array([[0, 255], [0, 2], [9, 255], [255, 255], [2, 2]], np.uint8)
    counts = count_rows(schema, [block])
    assert {name: own.tolist() for name, own in counts.tables.items()} == {"u": [0, 0, 2, 3], "i": [2, 1, 3], "p": [5]}


def test_a_block_of_another_schema_is_refused():
    block = oracle.make_block(oracle.make_schema(one_hot=2), 3, 1, np.random.default_rng(0))
    with pytest.raises(InputError, match="row block layout: got"):
        count_rows(SCHEMA, [block])


def test_zipf_reads_follow_the_law_and_their_number_is_that_of_all_ids():
    schema = schema_of((1000, 2), (7, 1), (1000, 4))
    counts = zipf_counts(schema, 1.2, 10**9)
    ranks = np.arange(1, 1001, dtype=np.float64)
    np.testing.assert_allclose(counts.tables["t0"], 1e9 * ranks**-1.2 / (ranks**-1.2).sum(), rtol=0, atol=0.5)
    assert all(abs(int(own.sum()) - 10**9) <= len(own) / 2 for own in counts.tables.values())
    assert counts.tables["t2"] is counts.tables["t0"]
    counts.check(schema)


def test_zipf_reads_of_a_table_are_those_of_all_its_features_and_full_bags():
    counts = zipf_counts(SCHEMA, 0.0, 13 * 10**6)
    assert counts.tables["bag0"].tolist() == [4 * 10**6] * 13
    assert counts.tables["n0"].tolist() == [13 * 10**6]


def test_a_billion_rows_of_zipf_are_all_counted_by_default():
    row = 10.0**9
    harmonic = np.log(row) + 0.5772  # of exponent 1
    assert 10**12 / (row * harmonic) > 40  # reads of the last row: rounding is a matter of 1 %
    assert zipf_counts(schema_of((3, 1)), 1.0).rows == 10**12


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (counts_of([1, 2], rows=0), "counts.rows: got 0, expected at least one scored row"),
        (RowCounts({}, 1), r"counts.tables: got \[\], expected the model's, \['t0'\]"),
        (counts_of([1, 2, 3]), r"counts.tables.t0: got 'int64\[3\]', expected int64\[2\]"),
        (RowCounts({"t0": np.zeros(2)}, 1), r"counts.tables.t0: got 'float64\[2\]', expected int64\[2\]"),
        (counts_of([1, -2]), "counts.tables.t0: got -2, expected counts of 0 and more"),
    ],
)  # fmt: skip
def test_counts_of_another_schema_are_refused(counts, message):
    with pytest.raises(InputError, match=message):
        counts.check(schema_of((2, 1)))


@pytest.mark.parametrize(("exponent", "rows", "where"), [(-0.1, 1, "exponent"), (float("nan"), 1, "exponent"), (1, 0, "rows")])
def test_a_law_that_makes_no_sense_is_refused(exponent, rows, where):
    with pytest.raises(InputError, match=f"zipf {where}: got"):
        zipf_counts(schema_of((2, 1)), exponent, rows)
