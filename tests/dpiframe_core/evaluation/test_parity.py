"""Parity statistics against their definitions, written out over all pairs and rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.evaluation.parity import parity, spearman
from dpiframe_core.evaluation.quality import ranks

FEW = st.lists(st.integers(0, 6), min_size=2, max_size=20)


@given(FEW)
def test_equal_values_share_their_mean_rank(values):
    ordered = sorted(values)
    expected = [np.mean([i + 1 for i, o in enumerate(ordered) if o == v]) for v in values]
    assert ranks(np.array(values, np.float64)).tolist() == expected


@given(st.data())
def test_the_rank_correlation_is_that_of_the_ranks(data):
    a, b = data.draw(FEW), data.draw(FEW)
    n = min(len(a), len(b))
    x, y = np.array(a[:n], np.float64), np.array(b[:n], np.float64)
    got = spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert got is None
        return
    assert got == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], abs=1e-12)


def test_deviation_is_of_the_probability_and_metrics_of_both_sides():
    source = np.array([0.1, 0.2, 0.3, 0.9])
    bundle = np.array([0.1, 0.25, 0.24, 0.9])
    labels = np.array([0, 1, 0, 1])
    made = parity(source, bundle, labels)
    assert (made.rows, made.max_deviation) == (4, pytest.approx(0.06))
    assert made.mean_deviation == pytest.approx((0.05 + 0.06) / 4)
    assert made.rank_correlation == pytest.approx(1 - 6 * 2 / (4 * 15))  # two neighbours swapped: sum of squares 2

    def auc(scores):
        pairs = [(p, n) for p, n in itertools.product(scores[labels == 1], scores[labels == 0])]
        return np.mean([p > n for p, n in pairs])

    assert made.auc == (auc(source), auc(bundle))
    assert made.log_loss[0] == pytest.approx(-np.mean(np.log([0.9, 0.2, 0.7, 0.9])))
    assert made.metrics().keys() == {
        "parity_rows", "parity_max_deviation", "parity_mean_deviation", "parity_rank_correlation", "source_auc", "auc",
        "source_log_loss", "log_loss",
    }  # fmt: skip
    assert "|dp| max 0.06, mean 0.0275" in made.report()


@pytest.mark.parametrize("labels", [None, np.ones(3, np.int64)])
def test_without_labels_of_both_kinds_there_is_neither_auc_nor_log_loss(labels):
    made = parity(np.full(3, 0.5), np.full(3, 0.5), labels)
    assert (made.auc, made.log_loss, made.rank_correlation) == (None, None, None)
    assert made.report().endswith("rank correlation undefined (equal scores)")
