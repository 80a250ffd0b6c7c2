"""Models that we have no function for, as plain modules: embeddings float32[rows, fields, dim] -> logits [rows, 1]."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


class Mlp(nn.Module):
    """Dense layers on the embeddings: what a call costs."""

    def __init__(self, fields: int, dim: int, hidden_units: Sequence[int] = (32,)) -> None:
        super().__init__()
        self.deep = nn.Sequential(*_mlp([fields * dim, *hidden_units]), nn.Linear(hidden_units[-1], 1))

    def forward(self, e: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.deep(e.flatten(1))
        return logits


class AutoInt(nn.Module):
    """Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks", 2019, eq. 5 to 9.

    In each layer and head h a field m becomes sum_k softmax_k(<W_Q e_m, W_K e_k>) W_V e_k; the heads side by side, plus
    W_res e_m, through ReLU, are the next layer's fields.
    """

    def __init__(self, fields: int, dim: int, layers: int = 3, heads: int = 2, head_dim: int = 32) -> None:
        super().__init__()
        self.heads, width = heads, heads * head_dim
        widths = [dim] + [width] * layers
        self.projections = nn.ModuleList(nn.Linear(n, 4 * width, bias=False) for n in widths[:-1])
        self.out = nn.Linear(fields * width, 1)

    def forward(self, e: torch.Tensor) -> torch.Tensor:
        for project in self.projections:
            q, k, v, residual = project(e).chunk(4, 2)
            q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
            mixed = torch.matmul(torch.matmul(q, k.transpose(2, 3)).softmax(3), v)
            e = torch.relu(mixed.transpose(1, 2).flatten(2) + residual)
        return self.out(e.flatten(1))


class MaskNet(nn.Module):
    """Wang et al., "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by Instance-Guided Mask", 2021: the
    parallel form, equations 3 to 10. A block is ReLU(LN(W (LN_emb(e) * mask))), its mask W_2 ReLU(W_1 e + b_1) + b_2.
    """

    def __init__(
        self,
        fields: int,
        dim: int,
        blocks: int = 3,
        block_units: int = 128,
        reduction: int = 2,
        hidden_units: Sequence[int] = (256, 128),
    ) -> None:
        super().__init__()
        width = fields * dim
        self.of_fields = nn.LayerNorm(dim)
        self.masks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, reduction * width), nn.ReLU(), nn.Linear(reduction * width, width))
            for _ in range(blocks)
        )
        self.layers = nn.ModuleList(nn.Linear(width, block_units, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(block_units) for _ in range(blocks))
        self.deep = nn.Sequential(*_mlp([blocks * block_units, *hidden_units]), nn.Linear(hidden_units[-1], 1))

    def forward(self, e: torch.Tensor) -> torch.Tensor:
        x, normed = e.flatten(1), self.of_fields(e).flatten(1)
        blocks = [
            torch.relu(norm(layer(normed * mask(x))))
            for mask, layer, norm in zip(self.masks, self.layers, self.norms, strict=True)
        ]
        return self.deep(torch.cat(blocks, 1))


class FinalMLP(nn.Module):
    """Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", 2023, equations 3 to 9.

    Two MLPs, each behind a gate 2 sigmoid(MLP of a few fields) on x; y = w_1 o_1 + w_2 o_2 + b + sum_h o_1h W_h o_2h.
    """

    def __init__(
        self,
        fields: int,
        dim: int,
        hidden_units: Sequence[int] = (400, 400, 400),
        gate_units: int = 256,
        gate_fields: int = 2,
        heads: int = 10,
    ) -> None:
        super().__init__()
        width, self.given, self.heads = fields * dim, gate_fields, heads
        self.gates = nn.ModuleList(
            nn.Sequential(nn.Linear(gate_fields * dim, gate_units), nn.ReLU(), nn.Linear(gate_units, width), nn.Sigmoid())
            for _ in range(2)
        )
        self.streams = nn.ModuleList(nn.Sequential(*_mlp([width, *hidden_units])) for _ in range(2))
        last = hidden_units[-1]
        self.linear = nn.ModuleList(nn.Linear(last, 1, bias=i == 0) for i in range(2))
        self.between = nn.Parameter(torch.empty(heads, last // heads, last // heads))

    def forward(self, e: torch.Tensor) -> torch.Tensor:
        x = e.flatten(1)
        given = e[:, : self.given].flatten(1), e[:, self.given : 2 * self.given].flatten(1)
        a, b = (s(x * (2 * g(own))) for s, g, own in zip(self.streams, self.gates, given, strict=True))
        of_a, of_b = (t.unflatten(1, (self.heads, -1)) for t in (a, b))
        mixed = torch.einsum("bhi,hij->bhj", of_a, self.between)
        return self.linear[0](a) + self.linear[1](b) + (mixed * of_b).flatten(1).sum(1, keepdim=True)


def _mlp(widths: Sequence[int]) -> list[nn.Module]:
    return [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
