"""DLRM's dots on a CPU against float64 from the formula, whatever the widths, parts and strides."""

from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import dot
from kernels.cpu.dot import CpuDot


def interaction(x: torch.Tensor, fields: int, dim: int, keep: int, diagonal: bool) -> np.ndarray:
    """float64[rows, keep + pairs]: pairs (i, j), j < i, by i and then by j (Naumov et al. 2019, section 2.1)."""
    vectors = x.double().numpy().reshape(len(x), fields, dim)
    pairs = (combinations_with_replacement if diagonal else combinations)(range(fields), 2)
    columns = [np.einsum("rd,rd->r", vectors[:, i], vectors[:, j]) for j, i in sorted(pairs, key=lambda p: (p[1], p[0]))]
    return np.column_stack([x.double().numpy()[:, :keep], *columns])


@pytest.mark.parametrize("way", ["C", "torch"])
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(2, 40), st.integers(1, 70)),
    first=st.integers(0, 1000), keep=st.integers(0, 1000), diagonal=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_dots_are_those_of_all_pairs(
    way: str, shape: tuple[int, int, int], first: int, keep: int, diagonal: bool, seed: int
) -> None:
    (rows, fields, dim), generator = shape, torch.Generator().manual_seed(seed)
    width = fields * dim
    x = torch.randn(rows, width + 3, generator=generator)[:, 1 : 1 + width]  # rows do not lie one after the other
    parts = x.split([first % width, width - first % width], 1) if first % width else (x,)
    with pytest.MonkeyPatch.context() as patch:
        if way == "torch":
            patch.setattr(dot, "cpu_library", lambda: None)
        found = CpuDot(fields, dim, keep % (width + 1), diagonal)(*parts)
    wanted = interaction(x, fields, dim, keep % (width + 1), diagonal)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5 * dim)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x = torch.randn(100, 27 * 64)
    own = CpuDot(27, 64, 64, diagonal=False)
    assert torch.equal(own(x)[40:41], own(x[40:41, :64], x[40:41, 64:]))


def test_halves_are_widened_and_more_vectors_than_fit_go_to_torch() -> None:
    x = torch.randn(3, 70 * 300).to(torch.bfloat16)
    found = CpuDot(70, 300, 5, diagonal=True)(x)
    np.testing.assert_allclose(found.numpy(), interaction(x, 70, 300, 5, True), rtol=1e-3, atol=1e-3)


def test_values_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dot: got parts of widths \[4, 5\], expected 8 columns together"):
        CpuDot(2, 4, 0, diagonal=False)(torch.zeros(1, 4), torch.zeros(1, 5))
