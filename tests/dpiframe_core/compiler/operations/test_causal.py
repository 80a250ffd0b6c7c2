"""Attention that looks back alone, in the spellings of people and of torch's own modules."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dpiframe_core import compile as compile_module
from dpiframe_core.errors import InputError
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.operations.lowered import Lowered
from tests.dpiframe_core.compiler.served import any_rows_score_as, exact
from tests.dpiframe_core.compiler.test_sequences import DIM, GPU_ONLY, STEPS, Base, example, schema

pytestmark = pytest.mark.bulk

INF = float("inf")
BACK = torch.ones(STEPS, STEPS, dtype=torch.bool).tril()


def encoder(m):
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True, dropout=0)
    m.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def heads(m):
    m.heads = nn.MultiheadAttention(DIM, 2, batch_first=True)


def square(m):
    return nn.Transformer.generate_square_subsequent_mask(STEPS, dtype=m.out.weight.dtype)


def by_hand(h, mask):
    return (h @ h.mT / DIM**0.5 + mask).softmax(-1) @ h


def tril_of_values(m, h, ids):
    """RecBole's: what is there, by who may look at it, as numbers to add."""
    there = (ids != 0).unsqueeze(1).unsqueeze(2)
    mask = torch.tril(there.expand((-1, -1, STEPS, -1)))
    return F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], torch.where(mask, 0.0, -10000.0).to(h.dtype))[
        :, 0
    ]


# h[rows, STEPS, DIM] of a history, and its ids -> [rows, STEPS, DIM]
CAUSAL = {
    "flag": lambda m, h, ids: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "flag of heads": lambda m, h, ids: F.scaled_dot_product_attention(
        *[h.view(h.shape[0], STEPS, 2, -1).transpose(1, 2)] * 3, is_causal=True, scale=0.3
    ).transpose(1, 2).flatten(2),
    "flag, fewer queries": lambda m, h, ids: F.scaled_dot_product_attention(h[:, :2], h, h, is_causal=True),
    "mask": lambda m, h, ids: F.scaled_dot_product_attention(h, h, h, BACK),
    "mask of numbers": lambda m, h, ids: F.scaled_dot_product_attention(h, h, h, square(m)),
    "tril to fill": lambda m, h, ids: (h @ h.mT).masked_fill(torch.tril(h.new_ones(STEPS, STEPS)) == 0, -INF).softmax(-1) @ h,
    "triu to fill": lambda m, h, ids: (h @ h.mT).masked_fill(h.new_ones(STEPS, STEPS).triu(1).bool(), -1e9).softmax(-1) @ h,
    "triu to add": lambda m, h, ids: by_hand(h, torch.triu(h.new_full((h.size(1), h.size(1)), -INF), diagonal=1)),
    "triu to add, finite": lambda m, h, ids: by_hand(h, torch.triu(h.new_ones(h.size(1), h.size(1)), 1) * -1e9),
    "mixed to add": lambda m, h, ids: by_hand(h, torch.triu(h.new_full((STEPS, STEPS), -INF), 1) + h.new_ones(STEPS)),
    "where": lambda m, h, ids: torch.where(BACK, h @ h.mT, -INF).softmax(-1) @ h,
    "where not": lambda m, h, ids: torch.where(~BACK, torch.full_like(h @ h.mT, -INF), h @ h.mT).softmax(-1) @ h,
    "where, of values": lambda m, h, ids: by_hand(h, torch.where((ids == 0)[:, None] & ~torch.eye(STEPS).bool(), -INF, 0.0)),
    "tril of values": tril_of_values,
    "encoder": lambda m, h, ids: m.encoder(h, mask=square(m)),
    "encoder, flag": lambda m, h, ids: m.encoder(h, mask=square(m), is_causal=True),
    "encoder, truths": lambda m, h, ids: m.encoder(h, mask=~BACK),
    "encoder, ended": lambda m, h, ids: m.encoder(
        h, mask=~BACK, src_key_padding_mask=(ids == 0) & (torch.arange(STEPS) > 0)
    ),
    "heads": lambda m, h, ids: m.heads(h, h, h, attn_mask=~BACK)[0],
    "heads, numbers": lambda m, h, ids: m.heads(h, h, h, attn_mask=square(m), need_weights=False)[0],
    "heads, flag": lambda m, h, ids: m.heads(h, h, h, attn_mask=square(m), is_causal=True, need_weights=False)[0],
}  # fmt: skip
MADE = {"encoder": encoder, "heads": heads}


class Causal(Base):
    def __init__(self, name):
        self.name = name
        super().__init__()

    def made(self):
        MADE.get(self.name.split(",")[0], lambda m: None)(self)

    def read(self, item, history, ids):
        seen = CAUSAL[self.name](self, history, ids)
        return (seen * torch.arange(1, 1 + seen.shape[1]).to(seen.dtype)[:, None]).sum(1)  # each place by its own weight

    def __deepcopy__(self, memo):
        copied = Causal(self.name)
        copied.load_state_dict(self.state_dict())
        return copied


@cache
def compiled_of(name):
    """The module and what it was compiled to; neither is to be changed."""
    module = Causal(name).eval()
    return module, compile_module(module, schema(), example())


@pytest.mark.parametrize("name", CAUSAL)
def test_a_spelling_keeps_its_scores(name):
    module, compiled = compiled_of(name)
    want = exact(module, example())
    torch.testing.assert_close(torch.from_numpy(compiled.golden.scores).double(), want, rtol=0, atol=1e-5)
    assert compiled.deviation <= 1e-5
    assert want.std() > 1e-3


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
@pytest.mark.parametrize("name", ["flag of heads", "triu to add", "tril of values", "encoder", "encoder, ended", "heads"])
def test_a_bundle_scores_as_the_module_did_for_any_rows(name, device, policy, tmp_path):
    module, compiled = compiled_of(name)
    compiled.write(tmp_path / "b", name="causal")
    any_rows_score_as(module, tmp_path / "b", example(), device, policy)


@pytest.mark.parametrize("device", BACKENDS)
def test_a_mask_to_add_is_a_sum_also_of_what_is_no_number(device):
    """-inf + NaN and -inf + inf are NaN, which a fill would hide."""
    mask = torch.tensor([[0.5, -INF, INF], [0.0, -INF, 2.0]])
    x = torch.tensor([[[1.0, 2, 3], [4, INF, -INF]], [[torch.nan] * 3, [-INF, -INF, INF]]])
    for function in (lambda x: x + mask, lambda x: mask + x, lambda x: x - -mask):
        torch.testing.assert_close(Lowered(function, 2, 3)(x, device), x + mask, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", BACKENDS)
def test_who_may_look_at_nothing_gets_zeros_as_torch_gives(device):
    """Of a mask that depends on values, and of one that does not."""
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
    x[2, :, 0], x[3, 1:, 0] = -3, -3
    blind = torch.tensor([[True] * 4, [False] * 4, [True, False, False, True], [False, True, True, False]])
    for mask in (lambda x: (x[:, None, :, 0] > -2.9).expand(-1, 4, -1), lambda x: blind):
        got = Lowered(lambda x, mask=mask: F.scaled_dot_product_attention(x, x, x, mask(x)), 4, 3)(x, device)
        want = F.scaled_dot_product_attention(*[x.double()] * 3, mask(x))
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
        assert (want == 0).all(-1).any()


def test_a_causal_mask_costs_one_node_and_no_product_more():
    flag, none = (
        Lowered(lambda x, causal=causal: F.scaled_dot_product_attention(x, x, x, is_causal=causal), 4, 3).ops
        for causal in (True, False)
    )
    assert sorted(flag) == sorted([*none, "aten.masked_fill.Scalar"])


def test_attention_with_grouped_queries_is_refused_with_the_way_around():
    class Grouped(Base):
        def read(self, item, history, ids):
            h = history.view(-1, STEPS, 4, 2).transpose(1, 2)
            return F.scaled_dot_product_attention(h, h[:, :2], h[:, :2], enable_gqa=True).transpose(1, 2).flatten(2).sum(1)

    with pytest.raises(InputError, match=r"got attention with .* grouped queries, expected none \(repeat_interleave the keys'"):
        compile_module(Grouped(), schema(), example())
