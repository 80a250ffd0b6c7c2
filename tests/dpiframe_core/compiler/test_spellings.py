"""Many ways to write a step of a model, each compiled by itself: every one keeps the module's scores."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dpiframe_core import compile as compile_model
from tests.dpiframe_core.compiler.modules import Embeddings, example, randomised, schema

pytestmark = pytest.mark.bulk

LEFT, RIGHT = zip(*[(i, j) for i in range(4) for j in range(i + 1, 4)], strict=True)
UPPER = torch.ones(4, 4).triu(1).bool()
MASK = torch.tensor([[i == j for i in range(4)] for j in range(4)])


def put(m, v):
    v = v * 1
    v[v > 0.5] = -0.25
    return v


def put_last(m, v):
    """As FuxiCTR's TransAct keeps one step of a history without any."""
    masked = v[..., 0] > 0
    masked[masked.sum(1) > 1, -1] = False
    return v.masked_fill(masked.unsqueeze(-1), 0.5)


def heads(m, v):
    """As FuxiCTR's BST has it: a step is seen by itself, whatever the mask says, and every head has the mask."""
    masked = (v[..., 0] > 0).unsqueeze(1).repeat(1, 4, 1)
    masked = masked & ~torch.eye(4).bool().unsqueeze(0).expand_as(masked)
    masked = masked.unsqueeze(1).repeat(1, 2, 1, 1).flatten(end_dim=1)
    added = torch.zeros_like(masked, dtype=v.dtype).masked_fill_(masked, float("-inf"))
    parts = v.unflatten(2, (2, 4)).transpose(1, 2).reshape(-1, 4, 4)
    return torch.baddbmm(added, parts, parts.transpose(1, 2)).softmax(2).bmm(parts).view(-1, 8, 4)


# v[rows, 4 fields, 8]; m: the module, with a square matrix w[8, 8], vectors, norms and projections.
STEPS = {
    "strided slice": lambda m, v: v[:, 1::2, ::3],
    "negative slice": lambda m, v: v[:, :-1, -5:],
    "select": lambda m, v: v[:, -1] * v.select(2, 3)[:, :1],
    "unbind": lambda m, v: torch.cat(v.unbind(1)[::-1], -1),
    "chunk uneven": lambda m, v: torch.cat(v.flatten(1).chunk(5, 1)[1:3], 1),
    "split sizes": lambda m, v: torch.cat(v.split([1, 3], 1), 1),
    "transposed flat": lambda m, v: v.transpose(1, 2).flatten(1),
    "regrouped": lambda m, v: v.reshape(v.shape[0], 2, 2, 4, 2).permute(0, 4, 2, 1, 3).reshape(v.shape[0], 8, 4),
    "batch second": lambda m, v: torch.tanh(v.transpose(0, 1) * 2).transpose(1, 0),
    "batch last": lambda m, v: v.permute(1, 2, 0).softmax(1).permute(2, 0, 1),
    "heads in the batch": lambda m, v: torch.bmm(v.reshape(-1, 2, 16), v.reshape(-1, 2, 16).transpose(1, 2)),
    "expand": lambda m, v: v[:, :1].expand(-1, 4, -1) * v,
    "expand as": lambda m, v: v[:, :, :1].expand_as(v) + v,
    "repeat": lambda m, v: v[:, 0].repeat(1, 2),
    "repeat each": lambda m, v: v[:, :, :1].repeat_interleave(8, 2) * v + v[:, :2].repeat_interleave(2, 1),
    "pairs": lambda m, v: (v[:, list(LEFT)] * v[:, list(RIGHT)]).sum(-1),
    "upper triangle": lambda m, v: (v @ v.transpose(1, 2))[:, torch.tensor(LEFT), torch.tensor(RIGHT)],
    "upper triangle by a mask": lambda m, v: torch.masked_select(v @ v.mT, UPPER).view(-1, 6),
    "mask with a batch": lambda m, v: (v @ v.mT).masked_select(mask=UPPER.unsqueeze(0)).reshape(v.size(0), -1) + v[:, 0, :6],
    "mask of masks": lambda m, v: torch.masked_select(v, (m.upper | MASK)[1].unsqueeze(-1)).view(-1, 24),
    "mask for every row": lambda m, v: v[:, :, :4].masked_fill(m.upper.expand(v.shape[0], -1, -1), 0.5),
    "mask repeated for every row": lambda m, v: v[:, :, :4] * UPPER.repeat(v.size(0), 1, 1),
    "mask as index": lambda m, v: (v @ v.mT)[:, UPPER] + v[:, 0, :6],
    "mask of the module": lambda m, v: torch.masked_select(v @ v.mT, m.upper).view(-1, 6).relu(),
    "mask of a buffer": lambda m, v: (v @ v.mT).masked_select(m.upper_of_one).reshape(v.size(0), -1),
    "mask of the module, as number": lambda m, v: (v @ v.mT) * m.upper + v[:, :, :4].masked_fill(m.upper, 0.5),
    "index select": lambda m, v: v.index_select(2, torch.tensor([7, 0, 0])),
    "bilinear": lambda m, v: torch.einsum("bfd,de,bge->bfg", v, m.w, v),
    "outer": lambda m, v: torch.einsum("bd,be->bde", v[:, 0], v[:, 1]),
    "einsum batch inside": lambda m, v: torch.einsum("fbd,de->fbe", v.transpose(0, 1), m.w).transpose(0, 1),
    "matrix first": lambda m, v: torch.matmul(m.w[:4, :4], v),
    "matrix and bias": lambda m, v: torch.addmm(m.b, v[:, 0], m.w),
    "tensordot": lambda m, v: torch.tensordot(v, m.w, dims=([2], [0])),
    "attention": lambda m, v: F.scaled_dot_product_attention(v, v, v),
    "attention with a mask": lambda m, v: F.scaled_dot_product_attention(v, v, v, attn_mask=~MASK),
    "masked attention by hand": lambda m, v: (v @ v.mT).masked_fill(MASK, float("-inf")).softmax(-1) @ v,
    "mask of values": lambda m, v: v.masked_fill(v > 0.5, 0.25),
    "where scalar": lambda m, v: torch.where(v > 0, v, -1.5) + torch.where(v.abs() < 0.1, 1.0, v),
    "mask as number": lambda m, v: v * (v.sum(-1, keepdim=True) > 0).float(),
    "not and or": lambda m, v: ((v > 0) & ~(v > 1) | (v < -1)).float() + v,
    "scalars": lambda m, v: 2 - v * 3 + 1 / (v.abs() + 1) - (v.exp() - 1) / 4 + 0.5**v,
    "alpha": lambda m, v: torch.add(v, v[:, :1], alpha=0.5) + torch.sub(v, m.b, alpha=2),
    "powers": lambda m, v: (v.abs() + 0.1) ** v + v**3 + v.square() + torch.pow(2.0, v),
    "roots and logarithms": lambda m, v: (v.abs() + 1).sqrt() + (v.abs() + 1).rsqrt() + v.abs().log1p() + (v.abs() + 1).log2(),
    "rounding": lambda m, v: (v * 3).floor() + (v * 3).ceil() + v.sign() + (v * 4).round() + (v * 5).trunc(),
    "angles and decades": lambda m, v: v.atan() + (v.abs() + 1).log10() + torch.logit(v, eps=0.1),
    "similarities": lambda m, v: F.cosine_similarity(v[:, :2], v[:, 2:], -1) * F.pairwise_distance(v[:, 0], v[:, 1])[:, None],
    "products of vectors": lambda m, v: torch.inner(v, m.w) + torch.linalg.vecdot(v[:, :1], v)[..., None],
    "mixed": lambda m, v: torch.lerp(v, v[:, :1], 0.3) + torch.addcmul(v, v, m.b) + torch.addcdiv(v, v, v.exp(), value=2),
    "gated": lambda m, v: F.glu(v) + F.celu(v[..., :4]) + F.threshold(v[..., 4:], 0.1, -1.0) + v[..., :4].clip(-0.2),
    "root mean square": lambda m, v: F.rms_norm(v, (8,), m.b) + torch.logaddexp(v, v[:, :1]),
    "rolled": lambda m, v: v.roll(1, 1) + v.roll((1, 2), (1, 2)) + torch.tile(v[:, :1], (1, 4, 1)),
    "differences": lambda m, v: torch.hstack([v.diff(dim=1), torch.tril(v)]).flatten(1) * torch.column_stack([v[:, 0, 0]] * 56),
    "padded": lambda m, v: F.pad(v, (1, 2)) + F.pad(v, (0, 3, 1, 1), value=0.5)[:, 1:-1] + nn.ConstantPad1d(2, 1.0)(v)[..., 1:],
    "edges": lambda m, v: F.pad(v, (1, 2), "reflect") + F.pad(v, (2, 1), "replicate") + F.pad(v, (3, 0), "circular"),
    "spread out": lambda m, v: F.interpolate(v, scale_factor=2) + F.interpolate(v[:, :1], 16),
    "windows": lambda m, v: v.unfold(1, 2, 1)[:, :2].flatten(2) * v.unfold(2, 3, 2)[:, :2].flatten(2)[..., :8].repeat(1, 1, 2),
    "windows of windows": lambda m, v: v.transpose(1, 2).unfold(1, 4, 2).unfold(2, 2, 2).flatten(1),
    "diagonals": lambda m, v: v.diagonal(1, 1, 2) + v.diagonal(-2, 2, 1)[:, :1] + torch.diag_embed(v[:, 0, :4]).sum(1),
    "turned round": lambda m, v: v.flip(1) * 2 + v.flip((1, 2)) + v[:, :, :4].rot90(1, (1, 2)).repeat(1, 1, 2),
    "where the largest is": lambda m, v: v.argmax(1) + v.max(1)[1] * v.min(1).values + v.argmin(2, keepdim=True)[:, 0],
    "products along": lambda m, v: v.cumprod(1) + v.prod(2, keepdim=True) + v.flatten(1)[:, :3].prod(1)[:, None, None],
    "remainders": lambda m, v: v % 0.7 + torch.fmod(v, 0.3) + v // 0.5 + torch.remainder(2.0, v.abs() + 0.5) + v.frac(),
    "rounded quotients": lambda m, v: torch.div(v, 0.4, rounding_mode="trunc") + (v / (m.b.abs() + 1)).floor_divide(0.2),
    "hyperbolic": lambda m, v: v.sinh() + v.cosh() + v.asinh() + (v.abs() + 1).acosh() + v.tanh().atanh() + F.tanhshrink(v),
    "angles": lambda m, v: v.tan() + v.tanh().asin() + v.tanh().acos() + v.exp2() + v.erfc() + v.sinc() + v.sgn(),
    "bilinear form": lambda m, v: F.bilinear(v[:, :2], v[:, 2:], torch.stack([m.w, m.w.t()]), m.b[:2]) + v[:, :2, :2],
    "distances": lambda m, v: torch.cdist(v, v[:, :2] + 1) + torch.cdist(v, v[:, 2:] - 1, p=1.0),
    "spread and mean": lambda m, v: torch.cat([*torch.std_mean(v, 1), *torch.var_mean(v, 1, correction=0)], 1),
    "shrunk": lambda m, v: F.softshrink(v, 0.2) + F.hardshrink(v, 0.3) + (v - 1).log().nan_to_num(0.5, 1.0, -1.0),
    "counted": lambda m, v: v.nansum(1) + (v > 0).count_nonzero(1) + torch.aminmax(v, dim=1)[1] + torch.heaviside(v, m.b)[:, 0],
    "any and all": lambda m, v: v * (v > 1).any(2, keepdim=True) + v * (v > -1).all(1, keepdim=True),
    "any of numbers": lambda m, v: v.relu().sub(v.relu().mul(2)).any(1) * v[:, 0],
    "masks side by side": lambda m, v: F.scaled_dot_product_attention(
        v, v, v, attn_mask=torch.cat([v[..., :1] > -9, v[..., :3] > 0], 2)
    ),
    "a padded mask": lambda m, v: F.scaled_dot_product_attention(v, v, v, attn_mask=F.pad(v[..., :3] > 0, (1, 0), value=True)),
    "missing numbers": lambda m, v: torch.where(v.isnan(), 0.5, v) * v.isfinite(),
    "limits": lambda m, v: v.clamp(-0.3, 0.4) + v.clamp(min=0) + v.clamp_max(0.1) + F.hardtanh(v) + F.relu6(v * 4),
    "limits of tensors": lambda m, v: v.clamp(m.b - 0.2, m.b + 0.5) + v.clamp(min=m.b) + v.clamp(max=v[:, :1]),
    "activations": lambda m, v: F.elu(v) + F.selu(v) + F.softplus(v) + F.mish(v) + F.gelu(v, approximate="tanh"),
    "leaky": lambda m, v: F.hardswish(v) + F.leaky_relu(v) + F.logsigmoid(v) + F.hardsigmoid(v) + F.silu(v) + F.softsign(v),
    "prelu by channel": lambda m, v: m.prelu(v),
    "maximum": lambda m, v: torch.maximum(v, m.b) + torch.minimum(v[:, :1], v) + v.amax(2, keepdim=True),
    "maximum of a dimension": lambda m, v: v.max(1)[0] + v.min(1).values + v.max(2, keepdim=True)[0][:, 0],
    "convolution of width 1": lambda m, v: F.conv1d(v, m.w[:3, :4, None], m.b[:3]),
    "reductions": lambda m, v: v.mean(1) + v.var(1) + v.std(1, correction=0) + v.logsumexp(1) + v.amin(1) + v.norm(dim=1),
    "norm and outer": lambda m, v: torch.linalg.norm(v, dim=2, keepdim=True) * v + torch.outer(v[:, 0, 0], m.b)[:, None],
    "normalise": lambda m, v: F.normalize(v, dim=2) * F.normalize(v, p=1, dim=1),
    "softmaxes": lambda m, v: v.softmax(1) + v.log_softmax(2) + v.cumsum(1),
    "layer norm": lambda m, v: m.norm(v) + F.layer_norm(v, (4, 8)),
    "batch norm by channel": lambda m, v: m.channels(v),
    "batch norm before": lambda m, v: m.features(v.flatten(1)),
    "a constant beside": lambda m, v: torch.cat([v, m.w[:2].expand(v.shape[0], -1, -1), v.new_ones((v.shape[0], 1, 8))], 1),
    "a stacked constant": lambda m, v: torch.stack([v[:, 0], m.b.repeat(v.shape[0], 1)], 1),
    "in place": lambda m, v: v.clone().mul_(2).add_(m.b).relu_(),
    "other names": lambda m, v: torch.multiply(torch.subtract(v, 0.5), torch.divide(v, 3))
    + torch.concat([v.absolute()[:, :1]] * 4, 1),
    "other comparisons": lambda m, v: v * torch.greater(v, 0.1) + torch.less_equal(v, m.b).float() + torch.special.expit(v),
    "maximum of two": lambda m, v: torch.max(v, m.b) - torch.min(v, 0.5 * v),
    "a number where a mask is": put,
    "the last of rows where a mask is": put_last,
    "a constant of the sizes of another": lambda m, v: v
    + m.w[None, :4].expand_as(v) * m.b.view(2, 4).view_as(m.b) - m.w[4:].type_as(v),
    "a mask of pairs, once a head": heads,
    "filled": lambda m, v: torch.zeros_like(v) + v + torch.full((v.shape[0], 1, 1), 0.5),
}  # fmt: skip


class Step(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step
        self.embeddings = Embeddings(8)
        self.w, self.b = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8))
        self.norm, self.prelu = nn.LayerNorm(8), nn.PReLU(4)
        upper = torch.ones(4, 4).triu(1).bool()
        self.upper = nn.Parameter(upper, requires_grad=False)
        self.register_buffer("upper_of_one", upper[None], persistent=False)
        self.channels, self.features = nn.BatchNorm1d(4), nn.BatchNorm1d(32)

    def forward(self, x):
        made = self.step(self, self.embeddings(x)).flatten(1)
        return torch.sigmoid((made * torch.linspace(-1, 1, made.shape[1])).sum(1, keepdim=True))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_its_scores(name):
    made = schema(8)
    module = randomised(Step(STEPS[name]))
    compiled = compile_model(module, made, example(made))
    assert compiled.deviation <= 1e-5
    assert compiled.golden.scores.std() > 1e-4
