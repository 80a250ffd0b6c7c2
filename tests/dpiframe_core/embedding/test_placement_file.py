"""A placement comes back from its directory as it was, and a directory that is none is refused in one line."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dpiframe_core.embedding import placement_file
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.placement_file import check_placement, read_placement, write_placement
from dpiframe_core.errors import BundleError, InputError
from tests.dpiframe_core.embedding.plan_schema import schema_of

SCHEMA = schema_of((6, 16), (3, 1))
RANKS = np.array([1, 0, 2], np.uint32)
PLACED = Placement(2, (TablePlacement("t0", 6, 1, 4), TablePlacement("t1", 3, 1, 2)), {"t1": RANKS})


def same(a, b):
    return (
        (a.gpus, a.tables, a.ranks.keys(), a.cold_reads) == (b.gpus, b.tables, b.ranks.keys(), b.cold_reads)
        and all((a.ranks[name] == b.ranks[name]).all() and a.ranks[name].dtype == np.uint32 for name in a.ranks)
    )  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.data())
def test_what_was_written_is_read(tmp_path_factory, data):
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=4))
    schema = schema_of(*shapes)
    gpus, tables, ranks = data.draw(st.integers(1, 4)), [], {}
    for t in schema.tables:
        hot = data.draw(st.integers(0, t.rows))
        tables.append(TablePlacement(t.name, t.rows, hot, hot if gpus == 1 else data.draw(st.integers(hot, t.rows))))
        if data.draw(st.booleans()):
            ranks[t.name] = np.array(data.draw(st.permutations(range(t.rows))), np.uint32)
    placed = Placement(gpus, tuple(tables), ranks, data.draw(st.just(np.inf) | st.floats(0, 1e6)))
    path = tmp_path_factory.mktemp("placements") / "folder" / "placed"
    write_placement(path, placed)
    assert same(read_placement(path, schema), placed)
    assert {p.name for p in path.parent.iterdir()} == {"placed"}
    assert (path / "ranks.safetensors").exists() == bool(ranks)


def test_a_placement_that_says_nothing_of_cold_reads_is_read(tmp_path):
    write_placement(tmp_path / "known", replace(PLACED, cold_reads=2.5))
    write_placement(tmp_path / "unknown", PLACED)
    known, unknown = (json.loads((tmp_path / name / "placement.json").read_text()) for name in ("known", "unknown"))
    assert known == unknown | {"cold_reads": 2.5}
    assert read_placement(tmp_path / "unknown", schema_of((6, 4), (3, 4))).cold_reads == np.inf


def test_whoever_may_read_one_file_may_read_both(tmp_path):
    write_placement(tmp_path / "placed", PLACED)
    assert len({path.stat().st_mode for path in (tmp_path / "placed").iterdir()}) == 1


def test_a_placement_replaces_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match=r"placement: got '.*taken', expected a path where nothing is yet"):
        write_placement(tmp_path / "taken", PLACED)


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"placement: got '.*file/placed', expected a path that may be written"):
        write_placement(tmp_path / "file" / "placed", PLACED)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def edited(path, **changes):
    """The placement written with some keys of its JSON changed; those of a table as `t0=..`."""
    write_placement(path, PLACED)
    fields = json.loads((path / "placement.json").read_text())
    for key, value in changes.items():
        if key in ("t0", "t1"):
            fields["tables"][int(key[1])] |= value
        else:
            fields[key] = value
    (path / "placement.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": "dpiframe-placement/2"},
            "placement.json: format: got 'dpiframe-placement/2', expected 'dpiframe-placement/1'",
        ),
        ({"gpus": 0}, "placement.json: gpus: got 0, expected greater than or equal to 1"),
        ({"cold_reads": -1}, "placement.json: cold_reads: got -1, expected greater than or equal to 0"),
        ({"cold_reads": np.nan}, "placement.json: cold_reads: got nan, expected "),
        ({"cold_reads": np.inf}, "placement.json: cold_reads: got inf, expected "),
        ({"gpus": "2"}, "placement.json: gpus: got '2', expected a valid integer"),
        ({"more": 1}, "placement.json: more: got 1, expected no such key"),
        ({"gpus": 1}, r"tables.t0: got \(1, 4\), expected no warm rows on a single GPU"),
        ({"t0": {"hot": 5}}, r"tables.t0: got \(5, 4, 6, 6\), expected 0 <= hot <= warm <= rows - in_files"),
        ({"t0": {"warm": 7}}, r"tables.t0: got \(1, 7, 6, 6\), expected 0 <= hot <= warm <= rows"),
        ({"t0": {"table": "no"}}, r"tables: got \['no', 't1'\], expected the model's, \['t0', 't1'\]"),
        ({"t0": {"rows": 7}}, "tables.t0.rows: got 7, expected 6, as the model has"),
        ({"t1": {"ranked": False}}, r"ranks.safetensors: got ranks of \['t1'\], expected of \[\], as placement.json"),
        (
            {"t0": {"ranked": True}},
            r"ranks.safetensors: got ranks of \['t1'\], expected of \['t0', 't1'\], as placement.json",
        ),
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, changes, message):
    path = edited(tmp_path / "placed", **changes)
    for read in (read_placement, check_placement):
        with pytest.raises(BundleError, match=f"placed.{message}|placed: {message}"):
            read(path, SCHEMA)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 1], r"ranks.t1: got 'uint32\[2\]', expected uint32\[3\]"),
        ([0, 1, 3], "ranks.t1: got 3, expected ranks below 3"),
        ([0, 2, 2], "ranks.t1: got 'no rank 1', expected each of the 3 ranks once"),
        (np.array([0, 1, 2], np.int64), r"ranks.t1: got 'int64\[3\]', expected uint32\[3\]"),
    ],
)
def test_ranks_that_are_no_permutation_are_refused(tmp_path, ranks, message):
    write_placement(tmp_path / "placed", PLACED)
    own = np.array(ranks, np.uint32) if isinstance(ranks, list) else ranks
    save_file({"t1": own}, tmp_path / "placed" / "ranks.safetensors")
    with pytest.raises(BundleError, match=f"placed: {message}"):
        read_placement(tmp_path / "placed", SCHEMA)


def test_ranks_are_counted_without_reading_them(tmp_path):
    write_placement(tmp_path / "placed", PLACED)
    check_placement(tmp_path / "placed", SCHEMA)
    save_file({"t1": RANKS[:2]}, tmp_path / "placed" / "ranks.safetensors")
    with pytest.raises(BundleError, match=r"placed: ranks.t1: got ranks of \[2\] rows, expected of \[3\]"):
        check_placement(tmp_path / "placed", SCHEMA)


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(placement_file, "save_file", full)
    with pytest.raises(InputError, match=r"placement: got .*, expected a path that may be written \(.*No space left"):
        write_placement(tmp_path / "placed", PLACED)
    assert [*tmp_path.iterdir()] == []


def test_what_is_missing_or_cut_short_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"nothing/placement.json: got .*No such file.*, expected JSON"):
        read_placement(tmp_path / "nothing", SCHEMA)
    write_placement(tmp_path / "placed", PLACED)
    ranks = tmp_path / "placed" / "ranks.safetensors"
    ranks.write_bytes(ranks.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"placed/ranks.safetensors: got .*, expected a whole safetensors file"):
        read_placement(tmp_path / "placed", SCHEMA)
    (tmp_path / "placed" / "placement.json").write_text("[1")
    with pytest.raises(BundleError, match=r"placed/placement.json: got .*, expected JSON"):
        read_placement(tmp_path / "placed", SCHEMA)
    (tmp_path / "placed" / "placement.json").write_text("[1]")
    with pytest.raises(BundleError, match=r"placement.json: format: got \[1\], expected 'dpiframe-placement/1'"):
        read_placement(tmp_path / "placed", SCHEMA)
