"""Rows copied into slots are those that their keys name, of every table of a group, and nothing else is written."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.copies.row_copies import row_copies
from kernels.runtime.c_build import cpu_library


def group_of(rows: int, slots: int, dims: list[int], dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = [torch.randint(-100, 100, (rows, dim)).to(dtype) for dim in dims]
    return [(table, torch.full((slots, table.shape[1]), 101).to(dtype)) for table in made]


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
@given(data=st.data())
def test_copies_are_the_rows_of_their_keys(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4))
    dims = st.lists(st.integers(1, 70), min_size=1, max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.int8])
    groups = [group_of(rows, slots, data.draw(dims), data.draw(dtypes)) for rows, slots in shapes]
    wanted = [
        (group, row, slot)
        for group, (rows, slots) in enumerate(shapes)
        for row, slot in zip(
            sorted(data.draw(st.sets(st.integers(0, rows - 1), max_size=min(rows, slots)))),
            data.draw(st.permutations(range(slots))),
            strict=False,
        )
    ]
    first_rows, first_slots = ([0, *accumulate(counts)] for counts in zip(*shapes, strict=True))
    keys = np.array([first_rows[group] + row for group, row, _ in wanted], np.int64)
    places = np.array([first_slots[group] + slot for group, _, slot in wanted], np.int64)
    copies = row_copies(groups)
    assert copies is not None
    copies.copy(keys, places)
    for number, group in enumerate(groups):
        filled = {slot: row for which, row, slot in wanted if which == number}
        for table, slots in group:
            for slot, found in enumerate(slots):
                expected = table[filled[slot]] if slot in filled else torch.full_like(found, 101)
                assert torch.equal(found, expected)


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
def test_tables_of_a_group_with_other_numbers_of_rows_or_slots_are_refused() -> None:
    one, other, wide = (group_of(rows, 4, [dim], torch.float32)[0] for rows, dim in ((8, 2), (9, 2), (8, 3)))
    fewer = one[0], one[1][:3]
    for group in (
        [one, other],
        [one, fewer],
        [(one[0], wide[1])],
        [(wide[0].t(), wide[0].t().clone())],
        [(one[0], one[1].half())],
    ):
        with pytest.raises(ValueError, match=r"group 1: got .* expected equally many rows, and slots like them"):
            row_copies([[one], group])
