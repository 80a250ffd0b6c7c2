"""blocks.c packs what NumPy packs, counts what is not legal, and refuses to go beyond a buffer or to lose a reference."""

import json
import random
import sys
from types import SimpleNamespace

import mmh3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.lookup.id_record import IdRecord
from kernels.runtime import c_build

BLOCKS = c_build.request_extension()
pytestmark = pytest.mark.skipif(BLOCKS is None, reason="there is no C compiler, or no headers of Python")

RECORD = IdRecord((1, 4, 2, 8, 1, 2))
SIZES = [200, 70_000, 300, 2**40, 255, 65_535]
LOWEST = [0, -1, 0, -1, -1, 0]
LEGAL = RECORD.legal(LOWEST, SIZES)
STAND_INS = np.zeros((2, 6), np.int64)


def ids_of(rows, dtype):
    rng = np.random.default_rng(rows)
    above = np.minimum(SIZES, np.iinfo(dtype).max)
    ids = rng.integers(LOWEST, above, (rows, 6), dtype)
    ids[0], ids[-1] = LOWEST, above - 1
    return ids


def pack(ids, out, at=0):
    return BLOCKS.pack_ids(LEGAL, ids, ids.itemsize == 8, len(ids), out, at, RECORD.nbytes)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_legal_ids_lie_in_records_as_numpy_packs_them(rows, dtype, shift):
    """Wherever the bytes begin that were sent."""
    ids = ids_of(rows, dtype)
    body = b"x" * shift + ids.tobytes()
    sent = np.ndarray(ids.shape, dtype, body, shift)
    want = np.zeros((rows, RECORD.nbytes), np.uint8)
    RECORD.pack(ids, want)
    out = np.zeros(64 + want.size + 8, np.uint8)
    assert pack(sent, out, 64) == 0
    assert out[64:-8].tobytes() == want.tobytes()
    assert not out[:64].any()
    assert not out[-8:].any()


@pytest.mark.parametrize("rows", [1, 2, 65, 300])
def test_marks_become_their_columns_stand_ins_in_the_records(rows):
    """-2, which is counted, and -3; padding stays."""
    rng, ids = np.random.default_rng(rows), ids_of(rows, np.int64)
    marks = rng.integers(-3, 3, ids.shape)
    marked = np.where(marks < -1, marks, ids)
    stand_ins = np.array([[9, 8, 7, 6, 5, 4], [1, 2, 3, 2**40 - 1, 0, 6]])
    want, out = np.zeros((rows, RECORD.nbytes), np.uint8), np.zeros(64 + rows * RECORD.nbytes + 8, np.uint8)
    RECORD.pack(np.where(marks == -2, stand_ins[0], np.where(marks == -3, stand_ins[1], ids)), want)
    columns = np.ascontiguousarray(marked.T)
    assert BLOCKS.settle_ids(LEGAL, columns, stand_ins, rows, out, 64, RECORD.nbytes) == (marks == -2).sum()
    assert out[64:-8].tobytes() == want.tobytes()
    assert not out[:64].any()
    assert not out[-8:].any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("column", range(6))
def test_each_id_that_is_not_legal_is_counted(dtype, column):
    bad = [LOWEST[column] - 1, np.iinfo(dtype).min, *(i for i in (SIZES[column], np.iinfo(dtype).max) if i >= SIZES[column])]
    bad = [i for i in bad if np.iinfo(dtype).min <= i <= np.iinfo(dtype).max]
    for wrong in bad:
        ids = ids_of(130, dtype)
        ids[[0, 70, 129], column] = wrong
        assert pack(ids, np.zeros(130 * RECORD.nbytes, np.uint8)) == 3


def test_numbers_are_copied_and_those_that_are_none_are_counted():
    numbers = np.arange(40, dtype=np.float32)
    numbers[:3] = np.finfo(np.float32).max, -np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    out = np.zeros(200, np.uint8)
    assert BLOCKS.copy_numbers(numbers, out, 8) == 0
    assert out[8:168].tobytes() == numbers.tobytes()
    numbers[[0, 17, 39]] = np.nan, np.inf, -np.inf
    assert BLOCKS.copy_numbers(numbers, out, 8) == 3


def test_numbers_are_lifted_as_they_are_read_and_scaled_into_rows_of_any_array():
    read, missing = np.zeros((2, 3)), np.zeros((2, 3), np.bool_)
    lifts = np.array([(0.0, 1.0), (-3.0, 0.1)])
    assert BLOCKS.column_numbers([[4, None, -7], [-2.5, 1e300, 0]], read, missing, np.arange(2), lifts) == 1
    np.testing.assert_array_equal(read, [[5, 1, 1], [-2.5 + 0.1, 1e300 + 0.1, 0.1]])
    block = np.full((3, 4), 9, np.float32)  # a row a candidate
    ends = np.array([(0.3, 7.0, -1.5), (0.1, 3.0, 0.0)])
    assert not BLOCKS.scaled_numbers(read, missing, ends, block.T, np.array([2, 0]))  # 1e300 is no float32
    with np.errstate(over="ignore"):
        wanted = ((read - ends[:, :1]) / ends[:, 1:2]).astype(np.float32)
    wanted[0, 1] = -1.5
    np.testing.assert_array_equal(block, np.stack([wanted[1], [9] * 3, wanted[0], [9] * 3], 1))
    assert BLOCKS.scaled_numbers(read[:1], missing[:1], ends[:1], block.T, np.array([1]))


def test_lists_of_numbers_become_floats_and_null_none():
    big = 2**53 + 1
    columns = [[1, 2.5, None], [-big, 1e300, 2**80]]
    out, missing = np.zeros((3, 3)), np.ones((3, 3), np.bool_)
    assert BLOCKS.column_numbers(columns, out, missing, np.array([2, 0])) == 1
    np.testing.assert_array_equal(out, [[float(-big), 1e300, 2.0**80], [0, 0, 0], [1, 2.5, 0]])
    assert np.flatnonzero(missing).tolist() == [3, 4, 5, 8]  # those of the row that nobody wrote, and that of None
    inf = float("inf")
    for other in (
        [True, 0, 0],
        ["1", 0, 0],
        [10**400, 0, 0],
        [np.float64(1), 0, 0],
        [inf, 0, 0],
        [0, 0, -inf],
        [inf - inf, 0, 0],
    ):
        assert BLOCKS.column_numbers([columns[0], other], out, missing, np.arange(2)) == -1


def vocabulary(*texts, first=0):
    data = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, data)])
    return BLOCKS.vocabulary(b"".join(data), ends, np.arange(first, first + len(data)))


def test_lists_of_text_become_the_ids_of_their_own_vocabularies():
    known, out = (vocabulary("a", "ö", "", first=2**40), vocabulary("a")), np.zeros((3, 4), np.int64)
    columns = [["a", "ö", None, ""], ["a", "b", None, "aa"]]
    assert BLOCKS.column_ids(columns, known, -2, -3, out, np.array([2, 0])) == 2  # some ids are below 0
    assert out.tolist() == [[0, -2, -3, -2], [0] * 4, [2**40, 2**40 + 1, -3, 2**40 + 2]]
    assert BLOCKS.column_ids([["a"] * 4] * 2, known, -2, -3, out, np.arange(2)) == 1
    for other in ([1, "a", "a", "a"], [b"a", "a", "a", "a"], ["a", "a", "a", np.str_("a")], ["a", "\ud800", "a", "a"]):
        assert BLOCKS.column_ids([["a"] * 4, other], known, -2, -3, out, np.arange(2)) == 0


@given(st.sets(st.text(max_size=20), max_size=200), st.lists(st.text(max_size=20), max_size=50))
def test_a_vocabulary_finds_its_texts_and_no_others(texts, others):
    ordered = sorted(text for text in texts if not any("\ud800" <= c <= "\udfff" for c in text))
    asked = [*ordered, *(text for text in others if not any("\ud800" <= c <= "\udfff" for c in text))]
    out, id_of = np.zeros(len(asked), np.int64), {text: i for i, text in enumerate(ordered)}
    assert BLOCKS.column_ids([asked], (vocabulary(*ordered),), -2, -3, out, np.zeros(1, np.int64)) in (1, 2)
    assert out.tolist() == [id_of.get(text, -2) for text in asked]


@given(st.lists(st.binary(max_size=40).map(lambda b: b.hex()), min_size=1), st.integers(0, 2**32 - 1), st.integers(1, 2**40))
def test_hashes_are_those_of_murmur3(texts, seed, buckets):
    out = np.zeros(len(texts), np.int64)
    rules = np.array([[seed, buckets, 3]])
    assert BLOCKS.column_hashes([texts], rules, -3, out, np.zeros(1, np.int64)) == 1
    assert out.tolist() == [mmh3.mmh3_32_uintdigest(text.encode(), seed) % buckets + 3 for text in texts]


def numbers_of(body, place):
    return BLOCKS.column_numbers([(2, 1, body, place)], OUT, OUT[:32], AT)


def test_an_array_is_read_where_it_lies_in_its_body():
    body, out, missing = b'{"a": [1, 2.5], "b": [null,4]}', np.zeros((2, 2)), np.zeros((2, 2), np.bool_)
    columns = [(2, 2, body, (21, 29)), (2, 2, body, (6, 14))]
    assert BLOCKS.column_numbers(columns, out, missing, np.arange(2)) == 1
    assert out.tolist() == [[0, 4], [1, 2.5]]
    found, rows, rest = BLOCKS.json_columns(b'{"candidates":%s}' % body, {"a": 12, "b": 12}, 9, 9)
    assert (rows, rest) == (2, b'{"candidates":{}}')
    assert [body[start - 14 : end - 14] for _, _, _, (start, end) in found.values()] == [b"[1, 2.5]", b"[null,4]"]
    assert BLOCKS.column_numbers([found["b"], found["a"]], out, missing, np.arange(2)) == 1


def objects_of(text, most=999):
    return BLOCKS.json_columns(b'{"candidates":[%s],"x":1}' % text, {"a": 12, "b": 2}, 1, most)


def test_objects_become_arrays_in_other_bytes_than_the_body():
    found, rows, rest = objects_of(b",".join(b'{"b":"t%d", "a":%d}' % (i, i) for i in range(200)))
    assert (rows, rest, [*found]) == (200, b'{"candidates":{},"x":1}', ["b", "a"])
    texts = {name: json.loads(body[start:end]) for name, (_, _, body, (start, end)) in found.items()}
    assert texts == {"b": [f"t{i}" for i in range(200)], "a": [*range(200)]}
    out, missing = np.zeros((1, 200)), np.zeros((1, 200), np.bool_)
    assert BLOCKS.column_numbers([found["a"]], out, missing, AT) == 0
    assert out[0].tolist() == [*range(200)]


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"1", b'{"a":1},', b'{"a":1},{}', b'{"a":1},{"b":"t"}', b'{"a":1},{"a":1,"b":"t"}', b'{"a":1,"a":2}',
     b'{"c":1}', b'{"a":1},{"a":1,"a":1}', b'{"a":"t"}', b'{"a":[1]}', b'{"a":{}}', b'{"b":"\\n"}', b'{"a":1}]',
     b'{"a":1},{"a":1', b'{"a":01}'],
)  # fmt: skip
def test_objects_that_are_not_plain_and_alike_are_left_to_others(text):
    assert objects_of(text) is None
    assert objects_of(b'{"a":1},{"a":null}', 2) is not None
    assert objects_of(b'{"a":1},{"a":null}', 1) is None


def test_objects_of_many_names_have_them_in_any_order():
    names, chance = [f"{'ö' * (i % 3)}{i}" for i in range(300)], random.Random(1)
    rows = [{name: i * k for k, name in enumerate(chance.sample(names, 300))} for i in range(9)]
    body = json.dumps({"candidates": rows}, ensure_ascii=False).encode()
    found, count, _ = BLOCKS.json_columns(body, dict.fromkeys(names, 4), 9, 9)
    columns = {name: json.loads(data[start:end]) for name, (_, _, data, (start, end)) in found.items()}
    assert (count, columns) == (9, {name: [row[name] for row in rows] for name in names})
    more = json.dumps({"candidates": [*rows, rows[0] | {"other": 1}]}, ensure_ascii=False).encode()
    assert BLOCKS.json_columns(more, dict.fromkeys([*names, "other"], 4), 99, 99) is None


def block_of(rows, contexts, size, places=(0, 0, 64, 0, 0, 128)):
    return SimpleNamespace(rows=rows, contexts=contexts, base=0, buffer=np.ones(size, np.uint8), places=places)


def settle(ids, out, at=0, stand_ins=STAND_INS):
    return BLOCKS.settle_ids(LEGAL, ids, stand_ins, 2, out, at, RECORD.nbytes)


OUT, AT, SOME = np.zeros(256, np.uint8), np.zeros(1, np.int64), vocabulary("a")
ONE, THREE, FLOATS = np.zeros(8, np.uint8), np.zeros(24, np.uint8), np.zeros((1, 1), np.float32)
PLACES, RULE, MANY = (0, 0, 64, 0, 0, 128), np.ones((1, 3), np.int64), (2, 2**31 - 1, b'["a"]', None)
FAULTS = {
    "no room for records": (ValueError, lambda: pack(ids_of(2, np.int32), np.zeros(2 * RECORD.nbytes - 1, np.uint8))),
    "records before the buffer": (ValueError, lambda: pack(ids_of(2, np.int32), np.zeros(100, np.uint8), -1)),
    "other rows": (ValueError, lambda: BLOCKS.pack_ids(LEGAL, ids_of(2, np.int32), False, 3, OUT, 0, RECORD.nbytes)),
    "no room for settled ids": (
        ValueError,
        lambda: settle(np.zeros((6, 2), np.int64), np.zeros(2 * RECORD.nbytes - 1, np.uint8)),
    ),
    "settled ids before the buffer": (ValueError, lambda: settle(np.zeros((6, 2), np.int64), OUT, -1)),
    "fewer columns of ids": (ValueError, lambda: settle(np.zeros((5, 2), np.int64), OUT)),
    "narrow ids": (ValueError, lambda: settle(np.zeros((6, 2), np.int32), OUT)),
    "ids row by row": (ValueError, lambda: settle(np.zeros((2, 6), np.int64).T, OUT)),
    "who stands for one mark only": (ValueError, lambda: settle(np.zeros((6, 2), np.int64), OUT, stand_ins=STAND_INS[:1])),
    "nobody who stands for marks": (TypeError, lambda: settle(np.zeros((6, 2), np.int64), OUT, stand_ins=None)),
    "settled ids that may not be written": (
        ValueError,
        lambda: settle(np.zeros((6, 2), np.int64), np.frombuffer(bytes(256), np.uint8)),
    ),
    "fewer arguments": (TypeError, lambda: BLOCKS.pack_ids(LEGAL, OUT)),
    "apart": (ValueError, lambda: pack(ids_of(4, np.int32)[::2], np.zeros(100, np.uint8))),
    "read only": (ValueError, lambda: BLOCKS.copy_numbers(np.zeros(2, np.float32), np.frombuffer(b"12345678", np.uint8), 0)),
    "no room for numbers": (ValueError, lambda: BLOCKS.copy_numbers(np.zeros(2, np.float32), OUT, 249)),
    "a place that is none": (TypeError, lambda: BLOCKS.copy_numbers(np.zeros(2, np.float32), OUT, "0")),
    "no buffer": (TypeError, lambda: BLOCKS.copy_numbers(None, OUT, 0)),
    "no place for rows": (ValueError, lambda: BLOCKS.fill(OUT, PLACES, ((2, 8),), [block_of(25, 1, 512)])),
    "a block that ends too soon": (ValueError, lambda: BLOCKS.fill(OUT, PLACES, ((2, 8),), [block_of(9, 1, 128)])),
    "fewer rows than none": (ValueError, lambda: BLOCKS.fill(OUT, PLACES, ((2, 8),), [block_of(-9, 1, 128)])),
    "rows beyond all bounds": (ValueError, lambda: BLOCKS.fill(OUT, PLACES, ((2, 8),), [block_of(2**62, 1, 128)])),
    "a section that is none": (ValueError, lambda: BLOCKS.fill(OUT, PLACES, ((5, 8),), [block_of(1, 1, 128)])),
    "five sections": (TypeError, lambda: BLOCKS.fill(OUT, PLACES, ((1, 1),) * 6, [])),
    "five places": (TypeError, lambda: BLOCKS.fill(OUT, PLACES[:5], (), [])),
    "columns of two lengths": (ValueError, lambda: BLOCKS.column_numbers([[1.0], [1.0, 2.0]], OUT, OUT, AT)),
    "columns that are no lists": (ValueError, lambda: BLOCKS.column_numbers([(1.0,)], OUT, OUT, AT)),
    "no columns": (TypeError, lambda: BLOCKS.column_numbers(None, OUT, OUT, AT)),
    "no bytes for what is missing": (ValueError, lambda: BLOCKS.column_numbers([[1.0]], OUT, OUT[:4], AT)),
    "rows before the array": (ValueError, lambda: BLOCKS.column_numbers([[1.0]], OUT, OUT[:32], AT - 1)),
    "rows beyond the array": (ValueError, lambda: BLOCKS.column_numbers([[1.0]], OUT, OUT[:32], AT + 32)),
    "rows beyond all memory": (ValueError, lambda: BLOCKS.column_hashes([MANY], RULE, 1, OUT, AT + 2**31 - 2)),
    "rows of other columns": (ValueError, lambda: BLOCKS.column_numbers([[1.0]], OUT, OUT[:32], np.arange(2))),
    "lifts of other columns": (ValueError, lambda: BLOCKS.column_numbers([[1.0]], OUT, OUT[:32], AT, OUT[:32])),
    "no lifts": (TypeError, lambda: BLOCKS.column_numbers([[1.0]], OUT, OUT[:32], AT, None)),
    "scales of other columns": (ValueError, lambda: BLOCKS.scaled_numbers(ONE, ONE[:1], ONE, FLOATS, AT)),
    "numbers into bytes": (ValueError, lambda: BLOCKS.scaled_numbers(ONE, ONE[:1], THREE, np.zeros((1, 1)), AT)),
    "numbers beyond the array": (ValueError, lambda: BLOCKS.scaled_numbers(ONE, ONE[:1], THREE, FLOATS, AT + 1)),
    "numbers before the array": (ValueError, lambda: BLOCKS.scaled_numbers(ONE, ONE[:1], THREE, FLOATS, AT - 1)),
    "numbers of fewer masks": (ValueError, lambda: BLOCKS.scaled_numbers(ONE, ONE[:0], THREE, FLOATS, AT)),
    "no buffer for ids": (TypeError, lambda: BLOCKS.column_ids([["a"]], (SOME,), 1, 1, None, AT)),
    "fewer vocabularies": (TypeError, lambda: BLOCKS.column_ids([["a"]], (), 1, 1, OUT, AT)),
    "a vocabulary that is none": (ValueError, lambda: BLOCKS.column_ids([["a"]], ({},), 1, 1, OUT, AT)),
    "an unknown that is none": (TypeError, lambda: BLOCKS.column_ids([["a"]], (SOME,), "a", 1, OUT, AT)),
    "offsets that go back": (ValueError, lambda: BLOCKS.vocabulary(b"ab", np.array([0, 2, 1]), np.arange(2))),
    "offsets beyond the texts": (ValueError, lambda: BLOCKS.vocabulary(b"ab", np.array([0, 3]), np.arange(1))),
    "as many offsets as ids": (ValueError, lambda: BLOCKS.vocabulary(b"ab", np.array([0, 2]), np.arange(2))),
    "no buckets": (ValueError, lambda: BLOCKS.column_hashes([["a"]], np.zeros((1, 3), np.int64), 1, OUT, AT)),
    "other rules": (ValueError, lambda: BLOCKS.column_hashes([["a"]], np.ones(2, np.int64), 1, OUT, AT)),
    "no such form": (ValueError, lambda: BLOCKS.column_numbers([(7, 1, b"12345678", None)], OUT, OUT[:32], AT)),
    "fewer bytes than numbers": (ValueError, lambda: BLOCKS.column_numbers([(4, 2, b"12345678", None)], OUT, OUT[:32], AT)),
    "a mask of other values": (ValueError, lambda: BLOCKS.column_numbers([(4, 1, b"12345678", b"12")], OUT, OUT[:32], AT)),
    "an array beyond its body": (ValueError, lambda: numbers_of(b"[1]", (0, 4))),
    "an array before its body": (ValueError, lambda: numbers_of(b"[1]", (-1, 3))),
    "an array of one bracket": (ValueError, lambda: numbers_of(b"[1]", (2, 3))),
    "an array that ends where it begins": (ValueError, lambda: numbers_of(b"[1]", (2, 2))),
    "an array without an end": (TypeError, lambda: numbers_of(b"[1]", (2,))),
    "kinds that are none": (TypeError, lambda: BLOCKS.json_columns(b"{}", None, 1, 1)),
    "no blocks": (TypeError, lambda: BLOCKS.fill(OUT, PLACES, (), None)),
    "no block": (AttributeError, lambda: BLOCKS.fill(OUT, PLACES, (), [None])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_that_cannot_be_is_refused_and_keeps_no_reference(fault):
    error, call = FAULTS[fault]
    held = [OUT, LEGAL, PLACES, BLOCKS]
    with pytest.raises(error):
        call()
    before = [sys.getrefcount(each) for each in held]
    for _ in range(20):
        with pytest.raises(error):
            call()
    assert [sys.getrefcount(each) for each in held] == before


def test_bytes_beyond_two_gigabytes_are_reached():
    far = np.zeros(2**31 + 4096, np.uint8)  # of which the system hands out the few pages that are touched
    block = block_of(3, 1, 512)
    block.buffer, block.places = far, (2**31, 0, 2**31 + 64, 0, 0, len(far))
    far[2**31 + 64 : 2**31 + 88] = np.arange(24)
    assert BLOCKS.fill(OUT, PLACES, ((2, 8),), (block,)) == 3
    assert OUT[64:88].tolist() == list(range(24))
    assert BLOCKS.copy_numbers(np.ones(2, np.float32), far, 2**31 + 8) == 0
    assert pack(ids_of(2, np.int32), far, 2**31 + 1024) == 0


def test_filling_keeps_no_reference_to_what_it_read():
    block = block_of(3, 1, 512)
    before = [sys.getrefcount(each) for each in (block, block.buffer, block.places, OUT)]
    for _ in range(100):
        assert BLOCKS.fill(OUT, PLACES, ((2, 8),), (block,)) == 3
    assert [sys.getrefcount(each) for each in (block, block.buffer, block.places, OUT)] == before


def test_what_is_no_replay_is_refused():
    with pytest.raises(ValueError, match="replay: got 3 bytes, expected 48"):
        BLOCKS.replay(b"abc", 1)
    with pytest.raises(TypeError):
        BLOCKS.replay(bytes(48), "1")
