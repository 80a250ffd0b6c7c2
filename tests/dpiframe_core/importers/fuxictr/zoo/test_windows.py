"""Of CCPM's pooling: which of equal windows stay."""

import numpy as np
import torch

from dpiframe_core.importers.fuxictr.zoo.windows import _greatest


def test_of_equal_windows_the_first_stay_and_in_their_order():
    x = np.random.default_rng(3).integers(0, 4, (200, 2, 9, 3)).astype(np.float32)
    order = np.argsort(-x, axis=2, kind="stable")[:, :, :4]  # of equal ones the first stands first
    expected = np.take_along_axis(x, np.sort(order, axis=2), axis=2)
    np.testing.assert_array_equal(_greatest(torch.from_numpy(x), 4).numpy(), expected)
    assert (x.transpose(0, 1, 3, 2).reshape(-1, 9) == 3).sum(1).max() > 4  # ties at the bound do occur
