"""What is computed by operators of other names: as torch gives it, for any number of rows."""

import pytest
import torch
from torch.nn import functional

from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.operations.lowered import Lowered

pytestmark = pytest.mark.bulk
SQUARE, CUBE = torch.arange(16.0).view(4, 4) / 16, torch.arange(96.0).view(4, 8, 3) / 96
AT = torch.tensor([2, 0, 2, 2])


FIELDS = torch.tensor([[[3, 0, 1, 2, 2, 1, 0, 3], [1, 1, 2, 2, 0, 0, 3, 3]]])
COLUMNS = torch.tensor([[[3, 0, 1, 2, 2], [1, 1, 2, 2, 0], [0, 0, 0, 3, 3]]])
EACH = torch.arange(8.0).view(2, 1, 4)


def heads(h):
    return h.view(h.shape[0], 4, 2, 4).transpose(1, 2).reshape(h.shape[0] * 2, 4, 4)


def dropouts(h):
    return (
        functional.dropout1d(h, training=False)
        + functional.alpha_dropout(h, training=False)
        + functional.feature_alpha_dropout(h, training=False)
    )


# h[rows, 4, 8]
SPELLED = {
    "taken along": lambda h: torch.take_along_dim(h, h.argsort(1), 1),
    "taken along, the rest as often as needed": lambda h: h.take_along_dim(h[:, :, :1].argsort(1, descending=True), dim=-2),
    "taken along, of one for all": lambda h: h[:, :1].take_along_dim(h.argsort(2)[:, :, :3], 2),
    "added at positions": lambda h: h.index_add(1, AT, h.flip(1)),
    "added at positions, scaled": lambda h: torch.index_add(h, -1, AT, h[..., :4].tanh(), alpha=-0.5),
    "added to nothing": lambda h: torch.zeros(h.shape[0], 3, 8).index_add_(1, AT, h),
    "gathered at the same positions in each row": lambda h: h.gather(1, FIELDS.expand(h.shape[0], -1, -1)),
    "gathered within the last dimension": lambda h: torch.gather(h.transpose(1, 2), -1, COLUMNS.expand(h.shape[0], 3, 5)),
    "dropouts": dropouts,
    "random slopes, as in evaluation": lambda h: functional.rrelu(h) + torch.rrelu(h, 0.1, 0.3),
    "a matrix a field": lambda h: torch.bmm(h.transpose(0, 1), CUBE).transpose(0, 1),
    "a matrix a field, and a bias": lambda h: torch.baddbmm(CUBE[:, :1], h.transpose(0, 1), CUBE).transpose(0, 1).tanh(),
    "a vector in front": lambda h: SQUARE[1] @ h,
    "einsum of any dimensions": lambda h: torch.einsum("...fd,fdk->...fk", h, CUBE),
    "einsum of any dimensions inside": lambda h: torch.einsum("b...d, dk -> bk...", h, CUBE[0]),
    "einsum without a result": lambda h: torch.einsum("bfd,dk", h, CUBE[1]),
    "heads beside a constant": lambda h: torch.cat([heads(h), torch.zeros(h.shape[0] * 2, 1, 4)], 1).view(-1, 2, 5, 4),
    "heads beside a constant each": lambda h: torch.cat([heads(h), EACH.repeat(h.shape[0], 1, 1)], 1).view(-1, 2, 5, 4),
    "trapezoid": lambda h: torch.trapezoid(h, dim=1),
    "tensordot of two": lambda h: torch.tensordot(h, CUBE, dims=2),
    "enlarged": lambda h: functional.interpolate(h, scale_factor=2, mode="linear"),
    "pixel shuffle": lambda h: functional.pixel_shuffle(h.unsqueeze(3), 2),
    "scaled products": lambda h: torch.baddbmm(SQUARE, h, h.transpose(1, 2), beta=0.5, alpha=2),
    "logarithm of powers of two": lambda h: torch.logaddexp2(h, h.flip(1)),
    "times powers of two": lambda h: torch.ldexp(h, torch.tensor([3, 0, -2, 1]).view(4, 1)),
    "close": lambda h: torch.isclose(h, h.round(decimals=1), atol=0.02).float() + h,
    "sorted in front": lambda h: torch.msort(h.transpose(0, 1)).transpose(0, 1),
    "powers of a matrix": lambda h: torch.linalg.matrix_power(h[..., :4], 3),
    "angles": lambda h: torch.deg2rad(h) + torch.rad2deg(h),
}  # fmt: skip


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", SPELLED)
def test_another_spelling_gives_what_torch_gives(name, device):
    function = SPELLED[name]
    lowered = Lowered(function, 4, 8)
    for n in (1, 5):
        h = torch.randn(n, 4, 8, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(lowered(h, device), function(h), rtol=1e-4, atol=1e-5)
