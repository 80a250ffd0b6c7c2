"""Masks and positions that a module makes of constants where it runs, as its code has them."""

import pytest
import torch

from dpiframe_core.errors import InputError
from tests.dpiframe_core.compiler.operations.lowered import Lowered

pytestmark = pytest.mark.bulk
WEIGHTS, CHANGED = torch.arange(4.0), torch.arange(4.0)


def dots(h):
    return h @ h.transpose(1, 2)


def off_diagonal(h):
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask.fill_diagonal_(False)
    return dots(h)[:, mask]


def by_a_part(h):
    mask = torch.zeros(4, 8)
    mask[1] = 1
    part = mask[2]
    part[3:] += 1
    return h[:, mask > 0]


def by_rows_written(h):
    mask = torch.zeros(4, dtype=torch.bool)
    mask[[0, 2]] = True
    return h[:, ~mask]


def twice_a_constant(h):
    own = WEIGHTS[1:]
    return h[:, WEIGHTS.clone().mul_(2) > 3] * own[0]


def pairs(h):
    first, second = torch.combinations(torch.arange(h.shape[1])).unbind(1)
    return (h[:, first] * h[:, second]).sum(2)


SELECTED = {
    "a mask written out": lambda h: h[:, torch.tensor([True, False, True, True])],
    "a mask of numbers": lambda h: h[:, torch.arange(4) % 2 == 0],
    "two masks": lambda h: h[:, torch.arange(4) > 1][:, :, torch.arange(8) < 3],
    "a triangle": lambda h: dots(h)[:, torch.triu(torch.ones(4, 4), diagonal=1).bool()],
    "a triangle, masked_select": lambda h: dots(h).masked_select(torch.ones(4, 4).tril(-1) == 1).view(-1, 6),
    "all but the diagonal": off_diagonal,
    "parts written": by_a_part,
    "rows written": by_rows_written,
    "a constant's copy changed": twice_a_constant,
    "pairs": pairs,
    "positions of what is true": lambda h: h[:, torch.eye(4)[2].nonzero().squeeze(1)],
    "by where": lambda h: h[:, torch.where(torch.arange(4) != 1)[0]],
    "given the sizes": lambda h: h[:, torch.arange(h.size(1)).ne(h.size(1) - 1)],
    "a choice among positions": lambda h: h[:, torch.arange(4)[torch.arange(4) > 1]],
    "a mask that is multiplied by, too": lambda h: (
        (h * (torch.arange(4) > 1)[:, None]).sum(1) + h[:, torch.arange(4) == 2][:, 0]
    ),
    "repeated by counts": lambda h: h[:, torch.arange(3).repeat_interleave(torch.tensor([2, 0, 1]))],
}


@pytest.mark.parametrize("name", SELECTED)
def test_what_constants_alone_make_selects_as_it_does_in_torch(name):
    function = SELECTED[name]
    lowered = Lowered(function, 4, 8)
    for n in (1, 5):
        h = torch.randn(n, 4, 8, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(lowered(h), function(h), rtol=1e-5, atol=1e-6)
    assert WEIGHTS.tolist() == [0, 1, 2, 3]


def changed_through_a_view(h):
    mask = torch.zeros(4, 4)
    for i in range(3):
        mask[i, i + 1] = 1
        mask.T[i, i + 1] = 1
    return dots(h)[:, mask > 0]


def changed_in_a_list(h):
    weights = torch.arange(4.0)
    torch._foreach_mul_([weights], 0.4)
    return h[:, weights > 1]


def repeats_written(h):
    often = torch.arange(2.0).repeat_interleave(2)
    often[0] = 5
    return h * often[:, None]


def positions_counted_on(h):
    at = torch.eye(4)[1].nonzero().squeeze(1)
    at += 1
    return h[:, at]


def by_names(h):
    made = h * 1
    torch.clamp_(input=made, min=0)
    return made * torch.nn.init.constant_(torch.empty(4, 1), 2.0)


def selected_once_more(h):
    mask = torch.arange(4) > 1
    zeroed = h * 1
    zeroed.masked_fill_(mask[:, None], 0)
    return zeroed.sum(1, keepdim=True) + h[:, mask]


CHANGED_ONES = [selected_once_more, changed_through_a_view, changed_in_a_list, repeats_written, positions_counted_on, by_names]


@pytest.mark.parametrize("function", CHANGED_ONES)
def test_constants_that_the_module_changes_are_what_they_became(function):
    h = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(Lowered(function, 4, 8)(h), function(h), rtol=1e-5, atol=1e-6)


def written_into(h):
    mask = torch.arange(4.0)
    mask.view(2, 2)[:] = h[0, :2, :2]
    return h[:, mask > 0]


def added_to(h):
    mask = torch.arange(4.0)
    mask += h[:, :, 0].amax(0)
    return h[:, mask > 0]


def multiplied_in_a_list(h):
    mask = torch.arange(4.0)
    torch._foreach_mul_([mask], h[0, 0, 0])
    return h[:, mask > 0]


def written_by_out(h):
    mask = torch.arange(4.0)
    torch.amax(h[:, :, 0], 0, out=mask)
    return h[:, mask > 0]


def written_as_its_data(h):
    mask = torch.arange(4.0)
    mask.data = h[:, :, 0].amax(0)
    return h[:, mask > 0]


def written_through_its_transpose(h):
    mask = torch.arange(4.0)
    mask.T.copy_(h.amax().expand(4))
    return h[:, mask > 0]


def a_view_of_the_batchs_size(h):
    mask = torch.ones(4, 8)
    mask.view_as(h[0])[1] = 0
    return h[:, mask > 0]


def drawn(h):
    return h[:, torch.nn.functional.gumbel_softmax(torch.zeros(4), hard=True) > 0]


def by_values(h):
    return h[:, h[0, :, 0] > 0]


def a_part_of_its_own_changed(h):
    part = CHANGED[1:]
    part += 1  # which the next call finds changed
    return h[:, CHANGED > 2]


NO_CONSTANTS = [
    written_into, added_to, multiplied_in_a_list, written_by_out, written_as_its_data, written_through_its_transpose,
    a_view_of_the_batchs_size, drawn, by_values, a_part_of_its_own_changed,
]  # fmt: skip


@pytest.mark.parametrize("function", NO_CONSTANTS)
def test_what_is_no_constant_selects_nothing(function):
    with pytest.raises(InputError):
        Lowered(function, 4, 8)
