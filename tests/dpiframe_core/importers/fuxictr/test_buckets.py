"""FuxiCTR's log-square buckets against its formula, number by number."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.importers.fuxictr.buckets import log_square_buckets

TOKENS = {0: 1, 1: 2, 2: 5, -1: 3, -3: 7, 4: 4, 9: 6, 30: 8}
OOV = 99


def row(x):
    """The formula of fuxictr/datasets/criteo.py, and the vocabulary."""
    token = math.floor(math.log(x) ** 2) if x > 2 else math.trunc(x)
    return TOKENS.get(token, OOV)


@given(st.floats(-10, 10) | st.floats(2, 1e9) | st.integers(-6, 2000).map(float))
def test_a_number_reads_the_row_of_its_token(x):
    made = log_square_buckets(TOKENS, OOV)
    assert made.rows[made.of(x)] == row(x)
    assert made.of(x) == np.searchsorted(np.array(made.transform.boundaries), x, side="right")


@pytest.mark.parametrize("k", range(1, 40))
def test_the_border_of_a_bucket_is_where_floats_put_it(k):
    made = log_square_buckets(TOKENS, OOV)
    near = math.exp(math.sqrt(k))
    for x in (near, math.nextafter(near, 0), math.nextafter(near, 1e300)):
        assert made.rows[made.of(x)] == row(x)
