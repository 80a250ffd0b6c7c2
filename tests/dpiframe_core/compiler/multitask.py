"""Multi-task models as their libraries build them: what the tests of several tasks are run on.

torch-rechub has all four. FuxiCTR's package has their layers; its zoo has MMoE, PLE and ShareBottom, put together here from the
papers (Ma et al. 2018; Tang et al. 2020) under its attribute names, with its `{label}_pred` outputs.
"""

import torch
from torch import nn

LABELS = ("click", "buy")
RECHUB_TOWER = {"dims": [20], "activation": "relu", "dropout": 0.1}


def rechub_model(name, columns):
    """`columns`: torch-rechub's features, embeddings first."""
    from torch_rechub.models.multi_task import ESMM, MMOE, PLE, SharedBottom

    experts, towers = {"dims": [24, 16], "activation": "relu", "dropout": 0.1}, [RECHUB_TOWER, RECHUB_TOWER]
    kinds = ["classification", "classification"]
    match name:
        case "MMOE":
            return MMOE(columns, kinds, 3, experts, towers)
        case "PLE":
            return PLE(columns, kinds, 2, 2, 1, experts, towers)
        case "SharedBottom":
            return SharedBottom(columns, kinds, experts, towers)
        case "ESMM":
            return ESMM(columns[:1], columns[1:3], RECHUB_TOWER, RECHUB_TOWER)
    raise AssertionError(name)


class FuxiModel(nn.Module):
    """The embeddings flattened, through `mixed` to a vector a task, through a tower each."""

    def __init__(self, features, dim, width, batch_norm=False):
        from fuxictr.pytorch.layers import FeatureEmbedding

        super().__init__()
        self.batch_norm, self.input = batch_norm, dim * features.num_fields
        self.embedding_layer = FeatureEmbedding(features, dim)
        self.tower = nn.ModuleList(self.block(width, [20], 1) for _ in LABELS)

    def block(self, width, hidden, out=None):
        from fuxictr.pytorch.layers import MLP_Block

        return MLP_Block(width, list(hidden), output_dim=out, dropout_rates=0.1, batch_norm=self.batch_norm)

    def forward(self, x):
        mixed = self.mixed(self.embedding_layer(x).flatten(start_dim=1))
        pairs = zip(LABELS, self.tower, mixed, strict=True)
        return {f"{label}_pred": tower(z).sigmoid() for label, tower, z in pairs}


class ShareBottom(FuxiModel):
    def __init__(self, features, dim, **more):
        super().__init__(features, dim, 16, **more)
        self.bottom = self.block(self.input, [24, 16])

    def mixed(self, x):
        return [self.bottom(x)] * len(LABELS)


class MMoE(FuxiModel):
    def __init__(self, features, dim, **more):
        super().__init__(features, dim, 16, **more)
        self.experts = nn.ModuleList(self.block(self.input, [24, 16]) for _ in range(3))
        self.gate = nn.ModuleList(self.block(self.input, [5], 3) for _ in LABELS)

    def mixed(self, x):
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        return [torch.sum(gate(x).softmax(-1).unsqueeze(-1) * experts, 1) for gate in self.gate]


class CGC(nn.Module):
    def __init__(self, block, width):
        super().__init__()
        tasks = len(LABELS)
        self.shared_experts = nn.ModuleList(block(width, [24, 16]) for _ in range(2))
        self.specific_experts = nn.ModuleList(block(width, [24, 16]) for _ in range(tasks))
        self.gate = nn.ModuleList(block(width, [5], 3 if i < tasks else 2) for i in range(tasks + 1))

    def forward(self, xs):
        shared, out = [expert(xs[-1]) for expert in self.shared_experts], []
        for i, gate in enumerate(self.gate):
            own = [self.specific_experts[i](xs[i])] if i < len(LABELS) else []
            experts = torch.stack(own + shared, 1)
            out.append(torch.sum(gate(xs[i]).softmax(-1).unsqueeze(-1) * experts, 1))
        return out


class PLE(FuxiModel):
    def __init__(self, features, dim, **more):
        super().__init__(features, dim, 16, **more)
        self.cgc_layers = nn.ModuleList(CGC(self.block, width) for width in (self.input, 16))

    def mixed(self, x):
        xs = [x] * (len(LABELS) + 1)
        for layer in self.cgc_layers:
            xs = layer(xs)
        return xs[: len(LABELS)]
