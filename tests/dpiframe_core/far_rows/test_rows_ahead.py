"""Leases: a lookup finds what the source has, whoever reads at the same time; and what happens when rows are late or lost."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dpiframe_core.errors import InputError, Overloaded, TooLarge, Unavailable
from dpiframe_core.far_rows.id_groups import id_groups
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.far_rows.row_source import FileRows
from dpiframe_core.far_rows.rows_ahead import RowsAhead
from dpiframe_core.far_rows.spare import Spare, spare_slots
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table

ROWS, HELD = 400, 100
TABLE = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)


def schema_of(features=2, oov=0):
    """Features f0, f1, .. of one table `t`, ids of two bytes."""
    each = tuple(
        Categorical(name=f"f{i}", values="int", encoder=Identity(), table="t", oov_id=oov, max_values=1 + i, missing_id=-i)
        for i in range(features)
    )
    return FeatureSchema(features=each, tables=(Table(name="t", rows=ROWS, dim=3),))


class Gate:
    """A source that waits until it is opened, and fails while it is `broken`."""

    mapped = None

    def __init__(self, *, opened=True):
        self.gate, self.broken, self.reads = threading.Event(), False, []
        if opened:
            self.gate.set()

    def parts(self, ids):
        return [np.arange(len(ids))]

    def read(self, wanted):
        assert self.gate.wait(10)
        if self.broken:
            raise OSError("the disk is gone")
        ((_, ids),) = wanted
        self.reads.append(sorted(ids.tolist()))
        return [TABLE[torch.from_numpy(ids)]]

    def close(self):
        pass


def ahead_of(source, slots=16, schema=None):
    schema = schema or schema_of()
    (group,) = id_groups(schema)
    spare = Spare(group, (HELD,), (None,), (torch.zeros(slots, 3),))
    return RowsAhead([spare], schema.block_layout, source), spare


def block_of(*ids, schema=None, feature="f0"):
    schema = schema or schema_of()
    block = RowBlock.allocate(schema.block_layout, len(ids))
    block.column(schema.columns[feature])[:, 0] = ids
    if feature == "f0" and len(schema.features) > 1:
        block.column(schema.columns["f1"])[:] = np.iinfo(np.uint16).max  # padding
    return block


def read_by(block, spare, schema=None):
    """float32[rows, 3]: what a lookup finds for f0."""
    ids = block.column((schema or schema_of()).columns["f0"])[:, 0].astype(np.int64)
    return torch.stack([TABLE[i] if i < ROWS else spare.rows[0][i - ROWS] for i in ids.tolist()])


@pytest.mark.parametrize("compiler", [True, False])
def test_ids_of_held_rows_and_padding_stay_and_the_others_lead_to_their_rows(compiler, monkeypatch):
    if not compiler:
        monkeypatch.setattr("kernels.copies.row_copies.cpu_library", lambda: None)
    ahead, spare = ahead_of(FileRows([TABLE]))
    block = block_of(3, 399, 100, 99, 399)
    with leased(ahead, [block]) as (ready,):
        ids = ready.column(schema_of().columns["f0"])[:, 0].tolist()
        assert ids[0] == 3
        assert ids[3] == 99
        assert ids[1] == ids[4] >= ROWS
        assert torch.equal(read_by(ready, spare), TABLE[[3, 399, 100, 99, 399]])
        assert (ready.column(schema_of().columns["f1"]) == np.iinfo(np.uint16).max).all()
    assert not block.staged
    ahead.close()


def test_an_id_that_would_lead_to_a_slot_without_being_read_leads_nowhere():
    ahead, spare = ahead_of(FileRows([TABLE]))
    with leased(ahead, [block_of(ROWS, ROWS + 15, 5)]) as (ready,):
        ids = ready.column(schema_of().columns["f0"])[:, 0].tolist()
    assert ids == [ROWS + spare.slots, ROWS + spare.slots, 5]
    ahead.close()


def test_rows_that_are_there_are_not_read_again():
    source = Gate()
    ahead, _ = ahead_of(source)
    for ids in ([200, 201], [201, 202], [200]):
        with leased(ahead, [block_of(*ids)]):
            pass
    assert source.reads == [[200, 201], [202]]
    ahead.close()


def test_requests_side_by_side_each_find_their_rows():
    ahead, spare = ahead_of(FileRows([TABLE]), slots=64)
    rng = np.random.default_rng(0)

    def score(seed):
        own = np.random.default_rng(seed)
        for _ in range(40):
            ids = own.integers(0, ROWS, 12)
            with leased(ahead, [block_of(*ids)]) as (ready,):
                if not torch.equal(read_by(ready, spare), TABLE[ids]):
                    return False
        return True

    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(score, rng.integers(0, 1000, 5)))
    assert ahead.held == 0
    ahead.close()


def test_more_rows_than_slots_are_too_many_and_held_slots_are_full_for_now():
    ahead, spare = ahead_of(FileRows([TABLE]), slots=4)
    with pytest.raises(TooLarge, match="got '5 rows in files of one table', expected at most 4, or more `ahead_mib`"):
        ahead.lease(block_of(*range(200, 205)))
    first = ahead.lease(block_of(200, 201, 202))
    with pytest.raises(Overloaded, match="got 2 to be read, 3 of 4 slots held"):
        ahead.lease(block_of(300, 301))
    first.close()
    with leased(ahead, [block_of(300, 301)]) as (ready,):
        assert torch.equal(read_by(ready, spare), TABLE[[300, 301]])
    ahead.close()


def test_late_rows_are_answered_by_those_of_unknown_values_and_counted():
    source = Gate(opened=False)
    schema = schema_of(oov=7)
    ahead, spare = ahead_of(source, schema=schema)
    lease = ahead.lease(block_of(150, 20, 160, 150, schema=schema))
    assert lease.settle() == 3
    assert lease.block.column(schema.columns["f0"])[:, 0].tolist() == [7, 20, 7, 7]
    source.gate.set()
    lease.wait()
    lease.close()
    with leased(ahead, [block_of(150, schema=schema)]) as (ready,):  # they came after all
        assert torch.equal(read_by(ready, spare, schema), TABLE[[150]])
    assert source.reads == [[150, 160]]
    ahead.close()


def test_a_row_of_unknown_values_that_files_hold_is_read_at_once_and_kept():
    schema = schema_of(oov=399)
    ahead, spare = ahead_of(FileRows([TABLE]), slots=3, schema=schema)
    place = ahead.unknown(0, 399)
    assert torch.equal(spare.rows[0][place - ROWS], TABLE[399])
    assert ahead.unknown(0, 5) == 5
    for start in range(100, 130, 2):
        with leased(ahead, [block_of(start, start + 1, schema=schema)]):
            pass
    assert torch.equal(spare.rows[0][place - ROWS], TABLE[399])
    ahead.close()


def test_a_source_that_fails_fails_who_waits_and_is_asked_again():
    source = Gate()
    ahead, spare = ahead_of(source)
    source.broken = True
    with (
        pytest.raises(Unavailable, match="rows in files: got the disk is gone, expected them to be readable"),
        leased(ahead, [block_of(150)]),
    ):
        pass
    source.broken = False
    with leased(ahead, [block_of(150)]) as (ready,):
        assert torch.equal(read_by(ready, spare), TABLE[[150]])
    assert ahead.held == 0
    ahead.close()


def test_slots_are_shared_by_bytes_and_ids_a_row():
    schema = FeatureSchema(
        features=(
            Categorical(name="a", values="int", encoder=Identity(), table="a", first_order_table="a_w", missing_id=0),
            Categorical(name="b", values="int", encoder=Identity(), table="b", max_values=3, missing_id=-1),
        ),
        tables=(
            Table(name="a", rows=70_000, dim=3),
            Table(name="a_w", rows=70_000, dim=1),
            Table(name="b", rows=90_000, dim=4),
        ),
    )
    groups = id_groups(schema)
    assert [g.tables for g in groups] == [(0, 1), (2,)]
    assert spare_slots(schema, [1000, 0, 5000], groups, 64 * 100) == [100, 300]
    assert spare_slots(schema, [10, 20, 0], groups, 64 * 100) == [30, 0]


def test_tables_of_one_feature_that_differ_in_rows_have_no_rows_in_files():
    schema = FeatureSchema(
        features=(Categorical(name="a", values="int", encoder=Identity(), table="a", first_order_table="w", missing_id=0),),
        tables=(Table(name="a", rows=300, dim=3), Table(name="w", rows=301, dim=1)),
    )
    with pytest.raises(InputError, match=r"rows of \['a', 'w'\] in files: got 301, expected tables of equally many rows"):
        spare_slots(schema, [5, 0], id_groups(schema), 1000)
