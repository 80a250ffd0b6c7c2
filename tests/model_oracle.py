"""Float64 scores of xDeepFM, DIN, DLRM and the forms of DCN-V2 from their papers' formulas, and random models to compare on.

Parameters go by the names that docs/models.md gives; activations, batch rows and layers are plain loops where that is clearer.
"""

import math

import numpy as np

from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table
from dpiframe_core.features.transforms import Bucketize
from dpiframe_core.graph.architecture import DIN, DLRM, DCNv2, DLRMDCNv2, LeakyReLU, XDeepFM
from tests.oracle import feature_values, sigmoid
from tests.oracle import first_order as first_order_terms


def make_schema(
    *, dim=8, one_hot=4, numbers=0, embedded_numbers=0, buckets=0, sequences=(), pairs=1, dtype="float32", first_order=False
):
    """Categories c0.., plain numbers p0.., numbers n0.. that scale a row, numbers b0.. in buckets, and for each length in
    `sequences` a behaviour s0.. that shares its table with the category of its number; with `pairs` 2 another one, t0.., of
    the next category's.
    """
    features, tables = [], []

    def table(name, rows, width=dim):
        tables.append(Table(name=name, rows=rows, dim=width, dtype=dtype if width == dim else "float32"))
        return name

    def first(name, rows):
        return table(f"{name}_w", rows, 1) if first_order else None

    for i in range(one_hot):
        scope = "context" if i == 1 else "candidate"
        features.append(
            Categorical(
                name=f"c{i}", scope=scope, values="int", encoder=Identity(), table=table(f"c{i}", 5 + 60 * i),
                first_order_table=first(f"c{i}", 5 + 60 * i),
            )
        )  # fmt: skip
    for i, length in enumerate(sequences):
        for j, name in enumerate(("s", "t")[:pairs]):
            features.append(
                Categorical(
                    name=f"{name}{i}", scope="context" if i % 2 == 0 else "candidate", values="int", encoder=Identity(),
                    table=f"c{i + j}", max_values=length, pooling="none", missing_id=-1,
                )
            )  # fmt: skip
    for i in range(embedded_numbers):
        features.append(Numeric(name=f"n{i}", table=table(f"n{i}", 1), first_order_table=first(f"n{i}", 1)))
    for i in range(buckets):
        ids = Bucketize(boundaries=tuple(range(6)), first_id=1)
        features.append(
            Numeric(name=f"b{i}", transforms=(ids,), table=table(f"b{i}", 8), first_order_table=first(f"b{i}", 8))
        )  # fmt: skip
    features += [
        Numeric(name=f"p{i}", scope="context" if i % 2 else "candidate", first_order_table=first(f"p{i}", 1))
        for i in range(numbers)
    ]
    return FeatureSchema(features=tuple(features), tables=tuple(tables))


def make_dense(shapes, rng):
    """Random float32 parameters of given shapes by name, of a size that keeps every layer's output near 1."""
    dense = {}
    for name, shape in shapes.items():
        last = name.rpartition(".")[2]
        scale = 1 / math.sqrt(shape[-1]) if last == "weight" else 0.3
        dense[name] = (rng.standard_normal(shape) * scale + (1 if last == "scale" else 0)).astype(np.float32)
    return dense


def block_diagonal(dense, experts, rank):
    """The experts' C, which see nothing of one another."""
    for name, value in dense.items():
        if name.endswith(".c.weight"):
            value *= np.kron(np.eye(experts), np.ones((rank, rank)))


def activate(kind, x, p, prefix):
    """An activation by its formula; `kind` as in an architecture."""
    if isinstance(kind, LeakyReLU):
        return np.where(x < 0, kind.slope * x, x)
    match kind:
        case "identity":
            return x
        case "relu":
            return np.maximum(x, 0)
        case "sigmoid":
            return sigmoid(x)
        case "tanh":
            return np.tanh(x)
        case "gelu":
            return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "prelu":
            return np.where(x < 0, p[f"{prefix}.alpha"] * x, x)
        case "dice":
            gate = sigmoid(p[f"{prefix}.scale"] * x + p[f"{prefix}.shift"])
            return gate * x + p[f"{prefix}.alpha"] * (1 - gate) * x
    raise AssertionError(kind)


def mlp(x, p, prefix, units, activation):
    each = activation if isinstance(activation, tuple) else (activation,) * len(units)
    for i, kind in enumerate(each):
        x = activate(kind, x @ p[f"{prefix}.{i}.weight"].T + p[f"{prefix}.{i}.bias"], p, f"{prefix}.{i}")
    return x


def cross(x0, p, layers, rank, experts, outer_bias=False):
    xl = x0
    for layer in range(layers):
        weight, bias = p[f"cross.{layer}.weight"], p[f"cross.{layer}.bias"]
        if experts is not None:
            gates = np.exp(xl @ p["cross.gates.weight"].T)
            mixed = np.zeros_like(x0)
            for e in range(experts):
                own = slice(e * rank, (e + 1) * rank)
                v = np.tanh(xl @ p[f"cross.{layer}.v.weight"][own].T)
                v = np.tanh(v @ p[f"cross.{layer}.c.weight"][own, own].T)
                mixed += gates[:, [e]] / gates.sum(1, keepdims=True) * x0 * (v @ weight[:, own].T + bias)
            xl = mixed + xl
            continue
        product = xl @ weight.T if rank is None else (xl @ p[f"cross.{layer}.v.weight"].T) @ weight.T
        xl = x0 * product + bias + xl if outer_bias else x0 * (product + bias) + xl
    return xl


def dots(vectors, diagonal):
    """Lower triangle, row by row. vectors[B, F, d]."""
    out = [
        (vectors[:, i] * vectors[:, j]).sum(1)
        for i in range(vectors.shape[1])
        for j in range(i + 1 if diagonal else i)
    ]  # fmt: skip
    return np.stack(out, 1) if out else np.zeros((len(vectors), 0))


def cin(x0, p, units, kind, halves, bias=True):
    """x0[B, m, d]."""
    xk, pooled = x0, []
    for k, n in enumerate(units):
        maps = np.zeros((len(x0), n, x0.shape[2]))
        weight = p[f"cin.{k}.weight"].reshape(n, xk.shape[1], x0.shape[1])
        for i in range(xk.shape[1]):
            for j in range(x0.shape[1]):
                maps += weight[:, i, j][None, :, None] * (xk[:, i] * x0[:, j])[:, None]
        maps = activate(kind, maps + (p[f"cin.{k}.bias"][None, :, None] if bias else 0), p, "")
        last = k == len(units) - 1
        pooled.append((maps[:, n // 2 :] if halves and not last else maps).sum(2))
        xk = maps[:, : n // 2] if halves else maps
    return np.concatenate(pooled, 1)


def attention(q, keys, mask, p, prefix, unit):
    """q[B, d], keys[B, L, d], mask[B, L] -> [B, d]."""
    out = np.zeros_like(q)
    for b in range(len(q)):
        weights = np.zeros(keys.shape[1])
        for i, k in enumerate(keys[b]):
            h = np.concatenate([q[b], k, q[b] - k, q[b] * k])
            h = mlp(h, p, prefix, unit.hidden_units, (unit.activation,) * len(unit.hidden_units))
            (w,) = p[f"{prefix}.out.weight"] @ h + p[f"{prefix}.out.bias"]
            weights[i] = activate(unit.output_activation, w, p, "")
        known = mask[b] if unit.masked else np.ones(keys.shape[1])
        if unit.softmax:
            e = np.exp(weights - weights.max()) * known
            weights = e / e.sum() if known.any() else np.zeros_like(e)
        out[b] = (weights * known) @ keys[b]
    return out


def sequence(schema, tables, block, name):
    """float64[B, L, dim] with zeros where the list ended, and its mask[B, L]."""
    f, place = schema.feature(name), schema.columns[name]
    ids = block.column(place)
    ids = np.where(ids == np.array(-1).astype(ids.dtype), -1, ids.astype(np.int64))
    ids = ids[block.request_of_row] if place.section.startswith("context") else ids
    weight = tables[f.table].astype(np.float64)
    return np.where((ids == -1)[:, :, None], 0.0, weight[ids]), (ids != -1).astype(np.float64)


def scores(schema, a, dense, tables, block):
    """float64[n, tasks]."""
    p = {k: v.astype(np.float64) for k, v in dense.items()}
    pooled = [f for f in schema.features if f.pooling != "none"]
    small = schema.model_copy(update={"features": tuple(pooled)})
    object.__setattr__(small, "columns", schema.columns)
    of = dict(zip((f.name for f in pooled), feature_values(small, tables, block), strict=True))
    logit = 0.0
    match a:
        case XDeepFM():
            embedded = np.stack([of[f.name] for f in pooled if f.table is not None], 1)
            h = cin(embedded, p, a.cin_units, a.cin_activation, a.cin_halves)
            if a.hidden_units:
                x = np.concatenate(list(of.values()), 1)
                h = np.concatenate([h, mlp(x, p, "deep", a.hidden_units, a.activation)], 1)
            logit = first_order_terms(schema, tables, block)
        case DIN():
            for i, unit in enumerate(a.attention):
                q = np.concatenate([of[name] for name in unit.targets], 1)
                read = [sequence(schema, tables, block, name) for name in unit.sequences]
                interest = attention(q, np.concatenate([k for k, _ in read], 2), read[0][1], p, f"attention.{i}", unit)
                ends = np.cumsum([k.shape[2] for k, _ in read])[:-1]
                of |= dict(zip(unit.sequences, np.split(interest, ends, 1), strict=True))
            h = mlp(np.concatenate([of[f.name] for f in schema.features], 1), p, "deep", a.hidden_units, a.activation)
        case DCNv2():
            x = np.concatenate(list(of.values()), 1)
            xl = cross(x, p, a.cross_layers, a.rank, a.experts, a.outer_bias)
            stacked = a.structure in ("stacked", "stacked_parallel")
            h = [mlp(xl, p, "deep", a.hidden_units, a.activation)] if stacked else [xl]
            if a.structure == "parallel":
                h.append(mlp(x, p, "deep", a.hidden_units, a.activation))
            if a.structure == "stacked_parallel":
                h.append(mlp(x, p, "parallel", a.parallel_hidden_units, a.activation))
            h = np.concatenate(h, 1)
        case DLRM() | DLRMDCNv2():
            numbers = np.concatenate([of[f.name] for f in pooled if f.table is None], 1)
            z = [mlp(numbers, p, "bottom", a.bottom_units, a.activation)] + [of[f.name] for f in pooled if f.table is not None]
            if isinstance(a, DLRM):
                h = np.concatenate([z[0], dots(np.stack(z, 1), a.self_interaction)], 1)
            else:
                h = cross(np.concatenate(z, 1), p, a.cross_layers, a.rank, None)
            h = mlp(h, p, "deep", a.hidden_units, a.activation)
    return sigmoid(h @ p["head.weight"].T + p["head.bias"] + logit)
