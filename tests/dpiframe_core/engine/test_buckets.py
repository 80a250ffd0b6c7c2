"""The choice of buckets against an exhaustive search, and what a recorded histogram may hold."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dpiframe_core.engine.buckets import (
    BatchSizes,
    batch_sizes,
    bucket_of,
    geometric_buckets,
    mean_cost,
    padding_waste,
    tuned_buckets,
)


def counted(max_rows, **by_rows):
    counts = np.zeros(max_rows + 1, np.int64)
    for rows, count in by_rows.items():
        counts[int(rows.removeprefix("r"))] = count
    return counts


def spent(buckets, counts, cost):
    """Cost of all batches, by hand."""
    return sum(int(n) * float(cost[min(b for b in buckets if b >= rows)]) for rows, n in enumerate(counts) if n)


@pytest.mark.parametrize("most", [1, 7, 8, 12, 13, 100, 4096])
def test_geometric_buckets_reach_the_largest_batch_and_pad_by_half_at_most(most):
    buckets = geometric_buckets(most)
    assert buckets[-1] == most
    assert list(buckets) == sorted(set(buckets))
    for small, large in pairwise(buckets):
        assert large <= 8 or large <= 2 * small


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=13),
    st.integers(1, 5),
    st.lists(st.integers(0, 20), min_size=13, max_size=13),
)
def test_no_other_choice_of_as_many_buckets_costs_less(numbers, how_many, steps):
    counts = np.array([0, *numbers[1:]], np.int64)
    if not counts.any():
        counts[1] = 1
    cost = np.cumsum([float(s) for s in steps[: len(counts)]])
    got = tuned_buckets(counts, how_many, cost, unseen=0.0)
    largest = len(counts) - 1
    assert len(got) <= how_many
    assert got[-1] == largest
    assert list(got) == sorted(set(got))
    others = ((*some, largest) for k in range(how_many) for some in combinations(range(1, largest), k))
    assert spent(got, counts, cost) == pytest.approx(min(spent(o, counts, cost) for o in others))


def test_rows_are_the_cost_if_none_is_given():
    counts = counted(100, r10=50, r11=2, r60=50)  # 50 rows of padding for the ten, or 98 for the eleven
    assert tuned_buckets(counts, 3, unseen=0.0) == (11, 60, 100)
    assert tuned_buckets(counts, 1) == (100,)


def test_a_cost_that_hardly_grows_below_a_size_wants_no_bucket_there():
    counts = counted(100, r2=50, r40=50, r80=50)
    flat_to_40 = np.where(np.arange(101) <= 40, 10.0, np.arange(101))
    assert tuned_buckets(counts, 3, flat_to_40, unseen=0.0) == (40, 80, 100)
    assert tuned_buckets(counts, 3, unseen=0.0) == (2, 40, 100)


def test_a_size_that_the_record_missed_does_not_run_at_the_largest_bucket():
    counts = counted(4096, r100=10**6)
    tuned = tuned_buckets(counts, 12)
    assert 100 in tuned
    for rows in (1, 101, 300, 1000):
        assert min(b for b in tuned if b >= rows) < 4 * max(rows, 25)
    assert tuned_buckets(counts, 12, unseen=0.0) == (100, 4096)


def test_sizes_beyond_what_the_search_weighs_are_covered_by_multiples():
    counts = counted(65536, r20=5, r30001=5)
    got = tuned_buckets(counts, 4)
    assert got[-1] == 65536
    assert all(b % 16 == 0 for b in got)


def test_padding_waste_is_the_share_of_computed_rows_that_nobody_asked_for():
    counts = counted(16, r3=2, r9=1)
    assert bucket_of((16, 4), counts).tolist() == [4] * 5 + [16] * 12
    assert padding_waste((4, 16), counts) == pytest.approx((1 + 1 + 7) / (4 + 4 + 16))
    assert padding_waste((3, 9, 16), counts) == 0
    assert padding_waste((), counts) == 0
    assert padding_waste((16,), counted(16)) == 0
    assert mean_cost((4, 16), counts, np.arange(17.0)) == pytest.approx((4 + 4 + 16) / 3)


def test_no_buckets_at_all_are_refused():
    with pytest.raises(ValueError, match="buckets: got 0, expected at least 1"):
        tuned_buckets(counted(4, r1=1), 0)


def test_counts_survive_the_way_through_json():
    shown = batch_sizes("m", "7", (4, 16), counted(16, r3=2, r9=1))
    assert shown.padding_waste == pytest.approx(9 / 24)
    read = BatchSizes.model_validate_json(shown.model_dump_json(), strict=True)
    assert read == shown
    assert read.array.tolist() == counted(16, r3=2, r9=1).tolist()
    assert BatchSizes.model_validate_json('{"max_batch_rows": 2, "counts": {"2": 5}}', strict=True).array.tolist() == [0, 0, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_batch_rows": 4, "counts": {"5": 1}}', "counts: got a batch of 5 rows, expected 1 to max_batch_rows 4"),
        ('{"max_batch_rows": 4, "counts": {"0": 1}}', "counts: got a batch of 0 rows, expected 1 to max_batch_rows 4"),
        ('{"max_batch_rows": 4, "counts": {"1": -1}}', "greater than or equal to 0"),
        ('{"max_batch_rows": 4, "counts": {"1": 1.5}}', "valid integer"),
        ('{"max_batch_rows": 70000, "counts": {}}', "less than or equal to 65536"),
        ('{"max_batch_rows": 4, "count": {}}', "counts"),
    ],
)
def test_a_histogram_that_cannot_be_one_is_refused(text, message):
    with pytest.raises(ValidationError, match=message):
        BatchSizes.model_validate_json(text, strict=True)
