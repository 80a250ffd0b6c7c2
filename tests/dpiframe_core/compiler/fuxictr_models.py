"""AutoInt, MaskNet, FinalMLP and PNN put together from FuxiCTR's own layers, under its model zoo's attribute names.

Written from the papers (Song et al. 2019; Wang et al. 2021; Mao et al. 2023; Qu et al. 2016) and the zoo's hyper-parameters.
"""

import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import (
    FeatureEmbedding,
    InnerProductInteraction,
    LogisticRegression,
    MLP_Block,
    ScaledDotProductAttention,
)
from fuxictr.pytorch.torch_utils import get_activation
from torch import nn


def feature_map(features, dim):
    """`features`: name -> FuxiCTR's specification."""
    made = FeatureMap("test", ".")
    made.features.update(features)
    made.num_fields, made.default_emb_dim = len(features), dim
    return made


class SelfAttention(nn.Module):
    def __init__(self, width, attention_dim, num_heads, use_scale, use_residual, layer_norm):
        super().__init__()
        self.num_heads, self.head_dim, self.use_residual = num_heads, attention_dim // num_heads, use_residual
        self.scale = self.head_dim**0.5 if use_scale else None
        self.W_q, self.W_k, self.W_v = (nn.Linear(width, attention_dim, bias=False) for _ in range(3))
        self.W_res = nn.Linear(width, attention_dim, bias=False) if use_residual and width != attention_dim else None
        self.dot_attention = ScaledDotProductAttention(0.1)
        self.layer_norm = nn.LayerNorm(attention_dim) if layer_norm else None

    def forward(self, X):
        rows = X.size(0)
        q, k, v = (w(X).view(rows, -1, self.num_heads, self.head_dim).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
        out, _ = self.dot_attention(q, k, v, scale=self.scale)
        out = out.transpose(1, 2).contiguous().view(rows, -1, self.num_heads * self.head_dim)
        if self.use_residual:
            out += X if self.W_res is None else self.W_res(X)
        return (out if self.layer_norm is None else self.layer_norm(out)).relu()


class AutoInt(nn.Module):
    def __init__(self, features, dim, *, hidden=(16, 8), layers=2, heads=2, attention_dim=8, batch_norm=False, layer_norm=False,
                 use_scale=False, use_wide=False, use_residual=True):  # fmt: skip
        super().__init__()
        self.embedding_layer = FeatureEmbedding(features, dim)
        self.lr_layer = LogisticRegression(features, use_bias=False) if use_wide else None
        self.dnn = MLP_Block(features.sum_emb_out_dim(), list(hidden), output_dim=1, dropout_rates=0.1,
                             batch_norm=batch_norm) if hidden else None  # fmt: skip
        self.self_attention = nn.Sequential(*(
            SelfAttention(dim if i == 0 else attention_dim, attention_dim, heads, use_scale, use_residual, layer_norm)
            for i in range(layers)
        ))  # fmt: skip
        self.fc = nn.Linear(features.num_fields * attention_dim, 1)

    def forward(self, X):
        fields = self.embedding_layer(X)
        y_pred = self.fc(torch.flatten(self.self_attention(fields), start_dim=1))
        if self.dnn is not None:
            y_pred += self.dnn(fields.flatten(start_dim=1))
        if self.lr_layer is not None:
            y_pred += self.lr_layer(X)
        return {"y_pred": y_pred.sigmoid()}


class PNN(nn.Module):
    """Qu et al. 2016: its layer of products holds a mask, by which it selects."""

    def __init__(self, features, dim, *, hidden=(16, 8)):
        super().__init__()
        fields = features.num_fields
        self.embedding_layer = FeatureEmbedding(features, dim)
        self.inner_product_layer = InnerProductInteraction(fields, output="inner_product")
        width = fields * (fields - 1) // 2 + fields * dim
        self.dnn = MLP_Block(width, list(hidden), output_dim=1, output_activation="Sigmoid")

    def forward(self, X):
        fields = self.embedding_layer(X)
        products = self.inner_product_layer(fields)
        return {"y_pred": self.dnn(torch.cat([fields.flatten(start_dim=1), products], dim=1))}


class MaskBlock(nn.Module):
    def __init__(self, width, hidden, out, activation, ratio, layer_norm):
        super().__init__()
        inner = int(hidden * ratio)
        self.mask_layer = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, hidden))
        norm = [nn.LayerNorm(out)] if layer_norm else []
        self.hidden_layer = nn.Sequential(
            nn.Linear(hidden, out, bias=False), *norm, get_activation(activation), nn.Dropout(0.1)
        )

    def forward(self, V_emb, V_hidden):
        return self.hidden_layer(self.mask_layer(V_emb) * V_hidden)


class MaskNet(nn.Module):
    def __init__(self, features, dim, *, hidden=(16, 8), parallel=0, block_dim=12, activation="ReLU", ratio=1, emb_norm=True,
                 net_norm=True):  # fmt: skip
        super().__init__()
        self.embedding_layer = FeatureEmbedding(features, dim)
        self.num_fields, width = features.num_fields, features.num_fields * dim
        self.emb_norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(self.num_fields)) if emb_norm else None
        if parallel:
            self.mask_blocks = nn.ModuleList(
                MaskBlock(width, width, block_dim, activation, ratio, net_norm) for _ in range(parallel)
            )
            self.dnn = MLP_Block(block_dim * parallel, list(hidden), output_dim=1, output_activation="Sigmoid")
        else:
            units = [width, *hidden]
            self.mask_blocks = nn.ModuleList(
                MaskBlock(width, units[i], units[i + 1], activation, ratio, net_norm) for i in range(len(hidden))
            )
            self.fc = nn.Sequential(nn.Linear(units[-1], 1), nn.Sigmoid())
        self.parallel = parallel

    def forward(self, X):
        fields = self.embedding_layer(X)
        hidden = fields
        if self.emb_norm is not None:
            parts = fields.chunk(self.num_fields, dim=1)
            hidden = torch.cat([self.emb_norm[i](part) for i, part in enumerate(parts)], dim=1)
        V_emb, out = fields.flatten(start_dim=1), hidden.flatten(start_dim=1)
        if self.parallel:
            return {"y_pred": self.dnn(torch.cat([block(V_emb, out) for block in self.mask_blocks], dim=-1))}
        for block in self.mask_blocks:
            out = block(V_emb, out)
        return {"y_pred": self.fc(out)}


class Gate(nn.Module):
    """One of FinalMLP's two feature selections: by the embeddings of some features, or by a learnt vector."""

    def __init__(self, features, dim, width, hidden, context):
        super().__init__()
        self.context = context
        if context:
            self.ctx_emb = FeatureEmbedding(features, dim, required_feature_columns=context)
        else:
            self.ctx_bias = nn.Parameter(torch.zeros(1, dim))
        self.gate = MLP_Block(dim * max(1, len(context)), list(hidden), output_dim=width, output_activation="Sigmoid")

    def forward(self, X, flat):
        given = self.ctx_emb(X).flatten(start_dim=1) if self.context else self.ctx_bias.repeat(flat.size(0), 1)
        return flat * (self.gate(given) * 2)


class InteractionAggregation(nn.Module):
    def __init__(self, x_dim, y_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_x_dim, self.head_y_dim = num_heads, x_dim // num_heads, y_dim // num_heads
        self.w_x, self.w_y = nn.Linear(x_dim, 1), nn.Linear(y_dim, 1)
        self.w_xy = nn.Parameter(torch.zeros(num_heads * self.head_x_dim * self.head_y_dim, 1))

    def forward(self, x, y):
        out = self.w_x(x) + self.w_y(y)
        head_x, head_y = x.view(-1, self.num_heads, self.head_x_dim), y.view(-1, self.num_heads, self.head_y_dim)
        xy = torch.matmul(head_x.unsqueeze(2), self.w_xy.view(self.num_heads, self.head_x_dim, -1))
        xy = torch.matmul(xy.view(-1, self.num_heads, 1, self.head_y_dim), head_y.unsqueeze(-1)).squeeze(-1)
        out += xy.sum(dim=1)
        return out


class FinalMLP(nn.Module):
    def __init__(self, features, dim, *, hidden1=(16, 8), hidden2=(12,), batch_norm=False, use_fs=True, fs_hidden=(6,),
                 fs1_context=(), fs2_context=(), heads=1, activation="ReLU"):  # fmt: skip
        super().__init__()
        self.embedding_layer = FeatureEmbedding(features, dim)
        width = dim * features.num_fields
        for name, hidden in (("mlp1", hidden1), ("mlp2", hidden2)):
            setattr(self, name, MLP_Block(width, list(hidden), activation, dropout_rates=0.1, batch_norm=batch_norm))
        self.fs1 = Gate(features, dim, width, fs_hidden, list(fs1_context)) if use_fs else None
        self.fs2 = Gate(features, dim, width, fs_hidden, list(fs2_context)) if use_fs else None
        self.fusion_module = InteractionAggregation(hidden1[-1], hidden2[-1], heads)

    def forward(self, X):
        flat = self.embedding_layer(X).flatten(start_dim=1)
        left, right = (flat, flat) if self.fs1 is None else (self.fs1(X, flat), self.fs2(X, flat))
        return {"y_pred": self.fusion_module(self.mlp1(left), self.mlp2(right)).sigmoid()}
