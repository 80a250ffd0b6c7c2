"""Plain PyTorch modules as people write them, with schemas and random examples: what the tests of `compile` are run on."""

import torch
from torch import nn

from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table

ROWS = {"user": 50, "item": 31, "tag": 7, "hour": 24}
NUMBERS = ("age", "price")
PADDING = {"words": 0, "seen": 2, "hist": 0}  # the ids of absent values in `Mixed`, and of histories


def categorical(name, table, first=None, **more):
    return Categorical(
        name=name, values="int", encoder=Identity(), table=table, first_order_table=first, missing_id=0, oov_id=1, **more
    )


def bag(name, table, values, pooling="sum", **more):
    return categorical(name, table, max_values=values, pooling=pooling, **more).model_copy(update={"missing_id": -1})


def schema(dim=8, *, numbers=False, first=False):
    """Categorical features of one table each; `numbers`: plain ones beside them; `first`: with first-order weights."""
    features = [categorical(n, n, f"{n}_w" if first else None) for n in ROWS]
    tables = [Table(name=n, rows=r, dim=dim) for n, r in ROWS.items()]
    tables += [Table(name=f"{n}_w", rows=r, dim=1) for n, r in ROWS.items() if first]
    features += [Numeric(name=n) for n in NUMBERS if numbers]
    return FeatureSchema(features=tuple(features), tables=tuple(tables))


def example(made, rows=23, seed=0):
    """feature -> random ids or numbers."""
    rng = torch.Generator().manual_seed(seed)
    values = {}
    for f in made.features:
        if not f.is_id:
            values[f.name] = torch.randn(rows, generator=rng)
            continue
        shape = (rows, f.max_values) if f.max_values > 1 else (rows,)
        values[f.name] = torch.randint(0, made.table(f.table).rows, shape, generator=rng)
    return values


def randomised(module, seed=0):
    """The same module with weights, statistics and all far from their initial values, in eval mode."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in [*module.named_parameters(), *module.named_buffers()]:
            if not p.is_floating_point():
                continue
            if name.endswith("running_var"):
                p.copy_(torch.rand(p.shape, generator=rng) + 0.5)
            elif p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=rng) / max(1, p.shape[-1]) ** 0.5)
            else:
                p.copy_(torch.randn(p.shape, generator=rng) * 0.3 + ("norm" in name or "bn" in name))
        for m in module.modules():
            if isinstance(m, nn.Embedding) and m.padding_idx is not None:
                m.weight[m.padding_idx] = 0
    return module.eval()


class Embeddings(nn.Module):
    """A table a field, stacked to [rows, fields, dim]."""

    def __init__(self, dim=8):
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(rows, dim) for name, rows in ROWS.items()})

    def forward(self, x):
        return torch.stack([table(x[name]) for name, table in self.tables.items()], 1)


class Mlp(nn.Module):
    """Embeddings and plain numbers into an MLP with batch norm and dropout."""

    def __init__(self, dim=8):
        super().__init__()
        self.embeddings = Embeddings(dim)
        self.net = nn.Sequential(
            nn.Linear(len(ROWS) * dim + len(NUMBERS), 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(16, 8), nn.PReLU(), nn.Linear(8, 1),
        )  # fmt: skip

    def forward(self, x):
        numbers = torch.stack([x[n] for n in NUMBERS], 1)
        return torch.sigmoid(self.net(torch.cat([self.embeddings(x).flatten(1), numbers], 1))).squeeze(-1)


class TwoTower(nn.Module):
    """User and item side apart, joined by a scaled dot product."""

    def __init__(self, dim=8):
        super().__init__()
        self.user, self.hour = nn.Embedding(ROWS["user"], dim), nn.Embedding(ROWS["hour"], dim)
        self.item, self.tag = nn.Embedding(ROWS["item"], dim), nn.Embedding(ROWS["tag"], dim)
        self.left = nn.Sequential(nn.Linear(2 * dim, 12), nn.GELU(), nn.Linear(12, 6))
        self.right = nn.Sequential(nn.Linear(2 * dim, 12), nn.SiLU(), nn.Linear(12, 6))

    def forward(self, user, item, tag, hour):
        a = self.left(torch.cat([self.user(user), self.hour(hour)], -1))
        b = self.right(torch.cat([self.item(item), self.tag(tag)], -1))
        return torch.sigmoid((nn.functional.normalize(a, dim=-1) * nn.functional.normalize(b, dim=-1)).sum(-1) * 3)


class Transformer(nn.Module):
    """Torch's own encoder over the fields and a learnt token in front of them."""

    def __init__(self, dim=8, heads=2, norm_first=False):
        super().__init__()
        self.embeddings = Embeddings(dim)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, heads, 16, batch_first=True, norm_first=norm_first), 2, enable_nested_tensor=False
        )
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        fields = self.embeddings(x)
        z = torch.cat([self.token.expand(fields.shape[0], -1, -1), fields], 1)
        return torch.sigmoid(self.out(self.encoder(z)[:, 0]))


class Normalised(nn.Module):
    """Layer norm over each field, gates between fields, an einsum, an in-place sum."""

    def __init__(self, dim=8):
        super().__init__()
        self.embeddings = Embeddings(dim)
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Parameter(torch.zeros(len(ROWS), len(ROWS), dim))
        self.deep = nn.Linear(len(ROWS) * dim, 5)
        self.out = nn.Linear(5, 1)

    def forward(self, x):
        z = self.norm(self.embeddings(x))
        crossed = torch.einsum("bfd,fgd->bgd", z, self.gate).softmax(1)
        h = torch.tanh(self.deep((z * crossed).flatten(1)))
        logit = self.out(h)
        logit += torch.where(z > 0, z, 0.1 * z).mean(dim=(1, 2)).unsqueeze(1)
        logit += z.transpose(1, 2).reshape(z.shape[0], -1)[:, 3:7].amax(1, keepdim=True).clamp(min=-1.0)
        return {"score": torch.sigmoid(logit)}


class DeepFM(nn.Module):
    """A factorization machine in FuxiCTR's manner, first-order weights, an MLP."""

    def __init__(self, dim=8):
        super().__init__()
        self.embeddings, self.first = Embeddings(dim), Embeddings(1)
        self.deep = nn.Sequential(nn.Linear(len(ROWS) * dim, 16), nn.ReLU(), nn.Linear(16, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        v = self.embeddings(x)
        pairs = 0.5 * (v.sum(1) ** 2 - (v * v).sum(1)).sum(-1, keepdim=True)
        first = self.first(x).sum(1)
        return torch.sigmoid(self.deep(v.flatten(1)) + pairs + first + self.bias)


class Products(nn.Module):
    """Products of pairs of fields that a mask of the module selects, in both spellings that people have for it."""

    def __init__(self, dim=8):
        super().__init__()
        self.embeddings = Embeddings(dim)
        upper = torch.ones(len(ROWS), len(ROWS)).triu(1).bool()
        self.triu_mask = nn.Parameter(upper, requires_grad=False)
        self.register_buffer("fields_mask", torch.tensor([True, False, True, True]))
        self.pairs = len(ROWS) * (len(ROWS) - 1) // 2
        self.deep = nn.Sequential(nn.Linear(3 * dim + self.pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        v = self.embeddings(x)
        pairs = torch.masked_select(v @ v.transpose(1, 2), self.triu_mask).view(-1, self.pairs)
        return torch.sigmoid(self.deep(torch.cat([v[:, self.fields_mask].flatten(1), pairs], 1)))


class CrossNet(nn.Module):
    """DCN-V2 as most people write it."""

    def __init__(self, dim=8, layers=2):
        super().__init__()
        self.embeddings = Embeddings(dim)
        width = len(ROWS) * dim
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.deep = nn.Sequential(nn.Linear(width, 16), nn.ReLU())
        self.out = nn.Linear(width + 16, 1)

    def forward(self, x):
        x0 = xl = self.embeddings(x).flatten(1)
        for layer in self.cross:
            xl = x0 * layer(xl) + xl
        return torch.sigmoid(self.out(torch.cat([xl, self.deep(x0)], -1)))


class Stacked(nn.Module):
    """One table for all fields, ids shifted by offsets, and the same for first-order weights in an embedding bag."""

    def __init__(self, dim=8):
        super().__init__()
        sizes = list(ROWS.values())
        self.table, self.first = nn.Embedding(sum(sizes), dim), nn.EmbeddingBag(sum(sizes), 1, mode="sum")
        self.register_buffer("offsets", torch.tensor([sum(sizes[:i]) for i in range(len(sizes))]))
        self.out = nn.Linear(len(sizes) * dim, 1)

    def forward(self, x):
        ids = x.long() + self.offsets
        return torch.sigmoid(self.out(self.table(ids).flatten(1)) + self.first(ids))


class Mixed(nn.Module):
    """A feature of several values summed and another one averaged, a shared table, a number as a vector, two scores."""

    def __init__(self, dim=8, mode="mean"):
        super().__init__()
        self.item = nn.Embedding(ROWS["item"], dim)
        self.words = nn.Embedding(11, dim, padding_idx=PADDING["words"])
        self.seen = nn.EmbeddingBag(13, dim, mode=mode, padding_idx=PADDING["seen"])
        self.age = nn.Linear(1, dim, bias=False)
        self.out = nn.Sequential(nn.Linear(5 * dim, 9), nn.Tanh(), nn.Linear(9, 2))

    def forward(self, item, last_item, words, seen, age):
        parts = [self.item(item), self.item(last_item), self.words(words).sum(1), self.seen(seen), self.age(age.unsqueeze(-1))]
        return torch.sigmoid(self.out(torch.cat(parts, -1)))


def mixed_schema(dim=8, mode="mean"):
    features = (
        categorical("item", "item"), categorical("last_item", "item", scope="context"), bag("words", "words", 4),
        bag("seen", "seen", 3, mode, padding_value=PADDING["seen"]), Numeric(name="age", table="age", scope="context"),
    )  # fmt: skip
    rows = {"item": ROWS["item"], "words": 11, "seen": 13, "age": 1}
    return FeatureSchema(features=features, tables=tuple(Table(name=n, rows=r, dim=dim) for n, r in rows.items()))


MODULES = {
    "mlp": (Mlp, lambda dim: schema(dim, numbers=True), {}),
    "two-tower": (TwoTower, schema, {"call": "keywords"}),
    "transformer": (Transformer, schema, {}),
    "normalised": (Normalised, schema, {}),
    "deepfm": (DeepFM, lambda dim: schema(dim, first=True), {}),
    "products": (Products, schema, {}),
    "cross-net": (CrossNet, schema, {}),
    "stacked": (Stacked, lambda dim: schema(dim, first=True), {"call": "matrix"}),
    "mixed": (Mixed, mixed_schema, {"call": "keywords"}),
    "mixed-max": (lambda dim: Mixed(dim, "max"), lambda dim: mixed_schema(dim, "max"), {"call": "keywords"}),
}


def called(module, values, options):
    """The module's own scores, float32[rows, tasks]."""
    with torch.no_grad():
        match options.get("call"):
            case "keywords":
                found = module(**values)
            case "matrix":
                found = module(torch.stack([v.float() for v in values.values()], 1))
            case _:
                found = module(values)
    found = found["score"] if isinstance(found, dict) else found
    return found.reshape(len(found), -1)
