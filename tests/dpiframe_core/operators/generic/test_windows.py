"""Windows of rows: every element is the column that sizes, strides and offset name."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpiframe_core.operators.generic.windows import window

SPECS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), max_size=4)


@settings(max_examples=300)
@given(SPECS, st.integers(0, 9), st.integers(0, 7))
def test_an_element_is_the_column_that_its_place_says(dims, offset, beyond):
    sizes, strides = tuple(s for s, _ in dims), tuple(s for _, s in dims)
    width = offset + sum((n - 1) * s for n, s in dims) + 1 + beyond
    rows = np.arange(3 * (width + 2), dtype=np.float32).reshape(3, width + 2)
    got = window(torch.from_numpy(rows)[:, :width], sizes, strides, offset)
    assert got.shape == (3, *sizes)
    for place in itertools.product(*map(range, sizes)):
        column = offset + sum(i * s for i, s in zip(place, strides, strict=True))
        assert (got[(slice(None), *place)].numpy() == rows[:, column]).all()


def made_by(t):
    """The names of the calls that a tensor came by."""
    waiting, seen = [t.grad_fn], set()
    while waiting:
        fn = waiting.pop()
        if fn is not None:
            seen.add(fn.name())
            waiting += [f for f, _ in fn.next_functions]
    return seen


def test_windows_that_overlap_are_views_too():
    """Those of a convolution of width 3 by steps of 2, over 9 steps of 16 behind 5 other columns."""
    x = torch.randn(4, 5 + 9 * 16, requires_grad=True)
    got = window(x, (4, 48), (32, 1), 5)
    assert not any("AsStrided" in name for name in made_by(got))
    assert got.data_ptr() == x.data_ptr() + 5 * 4
    np.testing.assert_array_equal(got.detach(), np.stack([x.detach()[:, 5 + 32 * i : 53 + 32 * i] for i in range(4)], 1))


def test_heads_and_chunks_are_views_that_name_what_they_read():
    """Of 39 fields, 2 heads of 16 in one of three chunks: no as_strided, at which a compiler stops joining."""
    x = torch.randn(4, 39 * 96, requires_grad=True)
    got = window(x, (2, 39, 16), (16, 96, 1), 32)
    assert not any("AsStrided" in name for name in made_by(got))
    np.testing.assert_array_equal(got.detach(), x.detach().view(4, 39, 3, 2, 16)[:, :, 1].transpose(1, 2))
