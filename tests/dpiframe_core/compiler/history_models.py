"""Models over histories as their users write them: SASRec's blocks with a CTR head, Caser's and CCPM's convolutions."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table

STEPS, DIM, USERS, ITEMS, HOURS = 9, 16, 40, 60, 24


def schema():
    plain = {"values": "int", "encoder": Identity()}
    steps = {"max_values": STEPS, "pooling": "none", "missing_id": -1, "padding_value": 0}
    features = (
        Categorical(name="user", scope="context", table="user", missing_id=0, **plain),
        Categorical(name="hist", scope="context", table="item", **plain, **steps),
        Categorical(name="item", table="item", missing_id=0, **plain),
        Categorical(name="hour", scope="context", table="hour", missing_id=0, **plain),
        Numeric(name="age", scope="context"),
    )  # fmt: skip
    rows = {"user": (USERS, DIM), "item": (ITEMS, DIM), "hour": (HOURS, HOURS)}
    return FeatureSchema(features=features, tables=tuple(Table(name=n, rows=r, dim=d) for n, (r, d) in rows.items()))


def example(rows, seed=0):
    """Histories of all lengths, the first row's empty, zeros behind them."""
    draw = torch.Generator().manual_seed(seed)
    hist = torch.randint(1, ITEMS, (rows, STEPS), generator=draw)
    for row in range(rows):
        hist[row, (row * 4) % (STEPS + 1) :] = 0
    return {
        "user": torch.randint(0, USERS, (rows,), generator=draw), "hist": hist,
        "item": torch.randint(1, ITEMS, (rows,), generator=draw), "hour": torch.randint(0, HOURS, (rows,), generator=draw),
        "age": torch.rand(rows, generator=draw) * 60 + 10,
    }  # fmt: skip


class PointWise(nn.Module):
    """SASRec's two layers for each step, as convolutions of width 1."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(DIM, DIM, kernel_size=1), nn.Conv1d(DIM, DIM, kernel_size=1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.second(F.relu(self.dropout(self.first(x.transpose(-1, -2)))))).transpose(-1, -2)


class Common(nn.Module):
    """Tables, and the layers that score what a history gave."""

    def __init__(self, width):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.register_buffer("ages", torch.tensor([18.0, 25, 35, 50]))
        self.age = nn.Embedding(5, 4)
        self.deep = nn.Sequential(nn.Linear(width + 2 * DIM + HOURS + 4, 32), nn.BatchNorm1d(32), nn.PReLU(), nn.Linear(32, 1))

    def scored(self, x, of_history):
        hour = F.one_hot(x["hour"], HOURS).to(of_history.dtype)
        age = self.age(torch.bucketize(x["age"], self.ages))
        inputs = [of_history, self.items(x["item"]), self.users(x["user"]), hour, age]
        return torch.sigmoid(self.deep(torch.cat(inputs, -1))).squeeze(-1)


class SasRec(Common):
    """Two causal blocks with the steps in front, as its PyTorch versions have them; the state of the last item."""

    def __init__(self, blocks=2):
        super().__init__(2 * DIM)
        self.places = nn.Embedding(STEPS + 1, DIM, padding_idx=0)
        self.before, self.between = (nn.ModuleList(nn.LayerNorm(DIM, eps=1e-8) for _ in range(blocks)) for _ in range(2))
        self.attention = nn.ModuleList(nn.MultiheadAttention(DIM, 2, dropout=0.2) for _ in range(blocks))
        self.forwards = nn.ModuleList(PointWise() for _ in range(blocks))
        self.last = nn.LayerNorm(DIM, eps=1e-8)

    def forward(self, x):
        ids = x["hist"]
        seqs = self.items(ids) * DIM**0.5
        seqs += self.places(torch.arange(1, ids.shape[1] + 1) * (ids != 0))
        causal = ~torch.tril(torch.ones((STEPS, STEPS), dtype=torch.bool))
        for norm, attention, after, forward in zip(self.before, self.attention, self.between, self.forwards, strict=True):
            seqs = torch.transpose(seqs, 0, 1)
            query = norm(seqs)
            seqs = query + attention(query, seqs, seqs, attn_mask=causal)[0]
            seqs = forward(after(torch.transpose(seqs, 0, 1)))
            seqs = seqs * (ids != 0).unsqueeze(-1)
        states = self.last(seqs)
        at = (ids != 0).sum(dim=1) - 1
        last = states[torch.arange(states.shape[0], device=states.device), at.clamp(min=0)]
        return self.scored(x, torch.cat([last, last * self.items(x["item"])], -1))


class Caser(Common):
    """Convolutions over a history as over an image: of several heights with the largest over time, and down each column."""

    def __init__(self, heights=(1, 2, 4), maps=5, down=3):
        super().__init__(maps * len(heights) + down * DIM)
        self.across = nn.ModuleList(nn.Conv2d(1, maps, (h, DIM)) for h in heights)
        self.down = nn.Conv2d(1, down, (STEPS, 1))

    def forward(self, x):
        image = self.items(x["hist"]).unsqueeze(1)
        found = [F.relu(conv(image)).squeeze(3) for conv in self.across]
        found = [F.max_pool1d(conv, conv.size(2)).squeeze(2) for conv in found]
        return self.scored(x, torch.cat([*found, self.down(image).flatten(1)], 1))


class KMax(nn.Module):
    """FuxiCTR's: the k largest along a dimension, in the order in which they stood."""

    def __init__(self, k, dim):
        super().__init__()
        self.k, self.dim = k, dim

    def forward(self, x):
        index = x.topk(self.k, dim=self.dim)[1].sort(dim=self.dim)[0]
        return x.gather(self.dim, index)


class Ccpm(Common):
    """CCPM over the steps of a history: padding, convolution down the embeddings, k-max pooling, tanh; with group norm."""

    def __init__(self):
        super().__init__(3 * 2 * DIM)
        self.layers = nn.Sequential(
            nn.ZeroPad2d((0, 0, 2, 2)), nn.Conv2d(1, 4, (5, 1)), KMax(4, 2), nn.GroupNorm(2, 4), nn.Tanh(),
            nn.Conv2d(4, 3, (3, 1), padding=(1, 0)), KMax(2, 2), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x):
        return self.scored(x, self.layers(self.items(x["hist"]).unsqueeze(1)).flatten(1))


class Fgcnn(Common):
    """FGCNN's layers: convolution over the steps, batch norm of the maps, pooling, and new embeddings by a linear layer."""

    def __init__(self):
        super().__init__(6 * DIM)
        self.conv, self.norm = nn.Conv2d(1, 4, (3, 1), padding=(1, 0)), nn.BatchNorm2d(4)
        self.pool, self.new = nn.MaxPool2d((2, 1), padding=(1, 0)), nn.Linear(4 * 5 * DIM, 6 * DIM)

    def forward(self, x):
        maps = self.pool(torch.tanh(self.norm(self.conv(self.items(x["hist"]).unsqueeze(1)))))
        return self.scored(x, torch.tanh(self.new(maps.flatten(1))))


MODELS = {"sasrec": SasRec, "caser": Caser, "ccpm": Ccpm, "fgcnn": Fgcnn}
