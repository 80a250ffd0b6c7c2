"""AUC and log-loss that come in parts are those of all rows, by their definitions."""

import numpy as np
import pytest

from dpiframe_core.evaluation.quality import RunningQuality


def test_parts_give_what_all_pairs_and_the_mean_of_all_rows_give():
    rng = np.random.default_rng(0)
    labels = rng.random(300) < 0.3
    scores = (rng.integers(1, 40, 300) / 41).astype(np.float32)  # many ties
    running = RunningQuality()
    for start in range(0, 300, 37):
        running.add(labels[start : start + 37], scores[start : start + 37])
    pairs = scores[labels][:, None] - scores[~labels][None]
    p = scores.astype(np.float64)
    auc, loss = running.result()
    assert auc == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-12)
    assert loss == pytest.approx(-np.where(labels, np.log(p), np.log(1 - p)).mean(), abs=1e-12)


@pytest.mark.parametrize("label", [True, False])
def test_labels_that_are_all_alike_have_no_auc(label):
    running = RunningQuality()
    running.add(np.full(3, label), np.array([0.5, 0.25, 0.125], np.float32))
    auc, loss = running.result()
    assert auc is None
    assert loss == pytest.approx(np.log([2, 4, 8]).mean() if label else -np.log([0.5, 0.75, 0.875]).mean())
