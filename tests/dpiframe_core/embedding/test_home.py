"""What an operator says about tables becomes a place for every row."""

from pathlib import Path

import numpy as np
import pytest

from dpiframe_core.embedding.home import home_of
from dpiframe_core.embedding.hot_rows import place_bytes
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.placement_file import write_placement
from dpiframe_core.errors import DPIFrameError, InputError
from tests import oracle

SCHEMA = oracle.make_schema()
BYTES = sum(t.bytes_used for t in SCHEMA.tables)


def test_memory_for_half_of_the_bytes_holds_the_least_ids_of_every_table():
    home = home_of(SCHEMA, "m", hbm_gib=BYTES / 2 / 2**30, placement=None, folder="/dev/shm")
    assert (home.placement.gpus, home.name, home.folder, home.placement.ranks) == (1, "m", Path("/dev/shm"), {})
    assert all(1 <= t.hot == t.warm <= t.rows for t in home.placement.tables)
    assert 0.4 * BYTES < home.placement.gpu_bytes(SCHEMA) <= 0.5 * BYTES
    assert home.placement.cold_reads == np.inf  # nobody has counted any


def test_memory_that_holds_all_leaves_nothing_to_the_host():
    home = home_of(SCHEMA, "m", hbm_gib=1, placement=None)
    assert home.placement.host_bytes(SCHEMA) == 0
    assert home.folder is None


def test_rows_that_may_move_leave_room_for_their_places():
    many = oracle.make_schema(one_hot=40, dim=32)
    size = sum(t.bytes_used for t in many.tables) // 2
    still, moving = (home_of(many, "m", hbm_gib=size / 2**30, placement=None, replan_s=s, replan_mib=2) for s in (None, 60))
    need = place_bytes(moving.placement.tables)
    assert need == 8 * sum(p.rows for p in moving.placement.tables if 0 < p.hot < p.rows) > 0
    assert moving.placement.gpu_bytes(many) + need <= size < still.placement.gpu_bytes(many) + need
    assert (moving.replan_s, moving.move_bytes, still.replan_s) == (60, 2 << 20, None)


def test_too_little_memory_for_places_is_said():
    many = oracle.make_schema(one_hot=40, dim=1)
    size = 8 * sum(t.rows for t in many.tables) // 2  # a row of each table, but not the places of all
    with pytest.raises(InputError, match=r"hbm_gib: got [\d.e-]+, expected room for \d+ bytes of places of rows that may move"):
        home_of(many, "m", hbm_gib=size / 8 / 2**30, placement=None, replan_s=60)


def test_a_plan_is_taken_as_it_was_written(tmp_path):
    table = SCHEMA.tables[0]
    plan = Placement(
        2,
        tuple(TablePlacement(t.name, t.rows, 1, 2 if t.rows > 1 else 1) for t in SCHEMA.tables),
        {table.name: np.arange(table.rows, dtype=np.uint32)[::-1].copy()},
    )
    write_placement(tmp_path / "plan", plan)
    home = home_of(SCHEMA, "m", hbm_gib=None, placement=str(tmp_path / "plan"))
    assert (home.placement.gpus, home.placement.tables) == (2, plan.tables)
    np.testing.assert_array_equal(home.placement.ranks[table.name], plan.ranks[table.name])


@pytest.mark.parametrize(("said", "message"), [({"hbm_gib": 1e-9}, "hbm_gib: got 9.31e-10, 1 bytes, expected at least"),
                                               ({"placement": "nowhere"}, "nowhere")])  # fmt: skip
def test_what_cannot_be_is_said(said, message):
    with pytest.raises(DPIFrameError, match=message):
        home_of(SCHEMA, "m", **{"hbm_gib": None, "placement": None, **said})
