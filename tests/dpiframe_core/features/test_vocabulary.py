"""Vocabularies of more entries than are looked at in one piece: the same checks, the same files."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpiframe_core.errors import BundleError
from dpiframe_core.features import repeats, vocabulary
from dpiframe_core.features.vocabulary import VocabularyTable, is_vocabulary, read_vocabulary, write_vocabulary
from kernels.runtime import c_build

TEXTS = [f"{i}é" * (i % 4) + f"{i}" for i in range(50)]


@pytest.fixture(autouse=True, params=[5, 1 << 20], ids=["shares", "whole"])
def small_pieces(request, monkeypatch):
    for module in (repeats, vocabulary):
        monkeypatch.setattr(module, "PIECE", 7)
    monkeypatch.setattr(repeats, "_AT_ONCE", request.param)


def chunked(values, kind, size):
    return pa.chunked_array([pa.array(values[at : at + size], kind) for at in range(0, len(values), size)], kind)


def table_of(values, ids, size=11):
    kind = pa.string() if isinstance(values[0], str) else pa.int64()
    return pa.table({"value": chunked(values, kind, size), "id": chunked(ids, pa.int64(), size)})


@pytest.mark.parametrize("size", [1, 7, 11, 50])
@pytest.mark.parametrize("twice", [(0, 49), (6, 7), (10, 11)])
def test_a_text_that_is_there_twice_is_found_wherever_it_is(size, twice):
    first, again = twice
    values = [*TEXTS[:again], TEXTS[first], *TEXTS[again + 1 :]]
    with pytest.raises(BundleError, match="twice"):
        VocabularyTable(table_of(values, list(range(50)), size))
    assert len(VocabularyTable(table_of(TEXTS, list(range(50)), size)).table) == 50


@pytest.mark.skipif(c_build.request_extension() is None, reason="without C")
@pytest.mark.parametrize("kind", [pa.int64(), pa.string()], ids=str)
@pytest.mark.parametrize("stride", [1, 3, -(1 << 20)])
def test_a_share_has_room_for_the_distinct_values_that_fall_to_it(kind, stride):
    values = chunked([stride * i for i in range(5000)], pa.int64(), 640).cast(kind)
    assert not repeats.may_repeat(lambda: [values], 5000)
    for again in (0, 2500, 4998):
        twice = pa.chunked_array([*values.chunks, values.slice(again, 1).combine_chunks()])
        assert repeats.may_repeat(lambda twice=twice: [twice], 5001)


@pytest.mark.skipif(c_build.request_extension() is None, reason="without C")
def test_texts_of_one_hash_are_compared_themselves(monkeypatch):
    alike = SimpleNamespace(text_hashes=lambda data, offsets, out: out.fill(7))
    monkeypatch.setattr(c_build, "request_extension", lambda: alike)
    assert len(VocabularyTable(table_of(TEXTS, list(range(50)))).table) == 50
    with pytest.raises(BundleError, match="got '0' twice"):
        VocabularyTable(table_of(["0", *TEXTS], list(range(51))))


@pytest.mark.skipif(c_build.request_extension() is None, reason="without C")
@pytest.mark.parametrize(("offsets", "size"), [([0, 5], 1), ([-1, 2], 1), ([2, 1, 3], 2), ([0, 1], 2), ([0], 1)])
def test_offsets_beyond_the_text_are_refused(offsets, size):
    with pytest.raises(ValueError, match=r"text_hashes: got offsets that do not fit"):
        c_build.request_extension().text_hashes(memoryview(b"abc"), np.array(offsets, np.int64), np.empty(size, np.uint64))


def test_equal_texts_have_equal_hashes_and_others_have_others():
    if (functions := c_build.request_extension()) is None:
        pytest.skip("without C")
    texts, data = [*TEXTS, *TEXTS[::-1]], "".join([*TEXTS, *TEXTS[::-1]]).encode()
    out, offsets = np.empty(100, np.uint64), np.cumsum([0, *(len(t.encode()) for t in texts)])
    functions.text_hashes(memoryview(data), offsets, out)
    assert (out[:50] == out[:49:-1]).all()
    assert len(set(out.tolist())) == 50


@pytest.mark.parametrize("values", [TEXTS, list(range(100, 150))], ids=["text", "integers"])
def test_entries_in_any_order_are_written_to_the_same_bytes_and_read_by_their_ids(tmp_path, values):
    mixed = np.random.default_rng(1).permutation(50)
    write_vocabulary(VocabularyTable(table_of(values, [i // 2 for i in range(50)])), tmp_path / "a.parquet")
    other = table_of([values[i] for i in mixed], [int(i) // 2 for i in mixed], 50)
    write_vocabulary(VocabularyTable(other), tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    read = read_vocabulary(tmp_path / "a.parquet").table
    assert dict(zip(read["value"].to_pylist(), read["id"].to_pylist(), strict=True)) == {
        v: i // 2 for i, v in enumerate(values)
    }
    assert read.equals(read.sort_by([("id", "ascending"), ("value", "ascending")]))


def test_no_entry_at_all_is_written_and_read(tmp_path):
    write_vocabulary(VocabularyTable.of({}), tmp_path / "a.parquet")
    assert read_vocabulary(tmp_path / "a.parquet").table.num_rows == 0


@pytest.mark.parametrize("values", [TEXTS, list(range(100, 150))], ids=["text", "integers"])
@pytest.mark.parametrize(
    "broken",
    [{}, {"value": (0, 49)}, {"value": (6, 7)}, {"id": {20: -1}}, {"value": {30: None}}, {"id": {49: None}}, {"name": "x"}],
    ids=str,
)
def test_a_file_is_checked_by_row_groups_as_it_is_as_a_whole(tmp_path, values, broken):
    values, ids, fault = list(values), list(range(50)), broken.get("value")
    if isinstance(fault, tuple):
        values[fault[1]] = values[fault[0]]
    elif fault:
        values[30] = None
    for at, id_ in broken.get("id", {}).items():
        ids[at] = id_
    table = table_of(values, ids).rename_columns(["value", broken.get("name", "id")])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    seen = []
    found = is_vocabulary(tmp_path / "a.parquet", lambda part: seen.append(len(part.table)))
    if broken:
        assert not found
        with pytest.raises(BundleError, match="vocabulary: got"):
            read_vocabulary(tmp_path / "a.parquet")
    else:
        assert found == (isinstance(values[0], int) or c_build.request_extension() is not None)
        assert not found or seen == [7] * 7 + [1]


def test_what_a_check_refuses_or_nothing_can_read_is_no_vocabulary(tmp_path):
    def refuse(part):
        raise BundleError("no")

    write_vocabulary(VocabularyTable.of({5: 0}), tmp_path / "a.parquet")
    assert is_vocabulary(tmp_path / "a.parquet", lambda part: None)
    assert not is_vocabulary(tmp_path / "a.parquet", refuse)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert not is_vocabulary(tmp_path / "a.parquet", lambda part: None)
