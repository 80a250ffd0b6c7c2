"""The bytes of a row's ids: which column lies where, how wide, and that nothing is lost on the way in and out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.lookup.id_record import IdRecord, carried_bytes, id_bytes


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), (2**31 - 1, 4), (2**31, 8)])
def test_an_id_takes_as_few_bytes_as_leave_all_ones_free(rows, width):
    assert id_bytes(rows) == width


def test_wider_columns_come_first_and_equal_ones_keep_their_order():
    record = IdRecord((1, 4, 2, 1, 4, 2, 1))
    assert record.offsets == (12, 0, 8, 13, 4, 10, 14)
    assert record.nbytes == 16


@pytest.mark.parametrize(
    ("widths", "nbytes"), [((), 0), ((1,), 4), ((2, 1, 1), 4), ((4, 1), 8), ((8,), 8), ((8, 4, 1), 16), ((1,) * 8, 8)]
)
def test_a_record_is_whole_words(widths, nbytes):
    assert IdRecord(widths).nbytes == nbytes


def test_a_record_is_little_endian_and_padding_is_all_ones():
    record, bytes_ = IdRecord((1, 2, 4, 2)), np.zeros((2, 12), np.uint8)
    record.pack(np.array([[7, 258, 1 + 2**24, -1], [-1, 0, -1, 9]]), bytes_)
    assert bytes_[0].tolist() == [1, 0, 0, 1, 2, 1, 255, 255, 7, 0, 0, 0]
    assert bytes_[1].tolist() == [255, 255, 255, 255, 0, 0, 9, 0, 255, 0, 0, 0]


def test_a_view_of_equal_columns_writes_through():
    record, bytes_ = IdRecord((4, 2, 2, 1)), np.zeros((3, 12), np.uint8)
    view = record.column(bytes_, 1, 2)
    view[:] = [[1, 2], [3, 4], [5, 6]]
    assert view.dtype == np.uint16
    assert record.widened(bytes_, np.int32).tolist() == [[0, 1, 2, 0], [0, 3, 4, 0], [0, 5, 6, 0]]


def test_columns_behind_the_others_leave_these_a_prefix_of_whole_words():
    record = IdRecord((2, 1, 2, 4, 1, 1), frozenset({0, 2, 4}))
    assert record.offsets == (8, 4, 10, 0, 12, 5)
    assert (record.prefix_bytes, record.nbytes) == (8, 16)
    assert IdRecord((2, 8), frozenset({1})).prefix_bytes == 8
    assert IdRecord((2, 2), frozenset({0, 1})).prefix_bytes == 0


@pytest.mark.parametrize(("widths", "behind", "numbers", "carried"), [
    ((2, 2, 1), (), 0, 8), ((2, 2, 1), (2,), 3, 16), ((4,) * 16, (), 0, 64), ((4,) * 16, (), 1, 0),
    ((4,) * 40, range(20, 40), 0, 0), ((4,), (0,), 0, 0),
])  # fmt: skip
def test_a_row_carries_its_contexts_prefix_and_numbers_where_they_are_few(widths, behind, numbers, carried):
    assert carried_bytes(IdRecord(widths, frozenset(behind)), numbers) == carried


@given(st.data(), st.lists(st.sampled_from((1, 2, 4, 8)), max_size=9), st.integers(0, 5))
def test_any_ids_come_back_as_they_were_from_aligned_places(data, widths, rows):
    record = IdRecord(tuple(widths), data.draw(st.frozensets(st.sampled_from(range(len(widths))) if widths else st.nothing())))
    of_prefix = [at + width for i, (at, width) in enumerate(zip(record.offsets, widths, strict=True)) if i not in record.behind]
    assert max(of_prefix, default=0) <= record.prefix_bytes <= min((record.offsets[i] for i in record.behind), default=10**6)
    assert all(at % width == 0 for at, width in zip(record.offsets, widths, strict=True))
    assert all(record.nbytes % width == 0 for width in widths)
    taken = [byte for at, width in zip(record.offsets, widths, strict=True) for byte in range(at, at + width)]
    assert len(set(taken)) == len(taken)

    def column(width):
        most = 2 ** (8 * width) - 2 if width < 4 else 2 ** (8 * width - 1) - 1
        return data.draw(st.lists(st.integers(-1, most), min_size=rows, max_size=rows))

    ids = np.array([column(width) for width in widths], np.int64).reshape(len(widths), rows).T
    bytes_ = np.zeros((rows, record.nbytes), np.uint8)
    record.pack(ids, bytes_)
    back = record.widened(bytes_, np.int64)
    assert back.dtype == np.int64
    assert back.tolist() == ids.tolist()
