"""Float64 scores of the models from their papers' formulas, and random models to compare on. Independent of the tested code:
only the border types (schema, architecture, row block) are shared.
"""

from itertools import cycle

import numpy as np

from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM, WideDeep


def make_schema(
    *, dim=16, one_hot=5, context=2, bags=1, embedded_numbers=2, plain_numbers=0, dtype="float32", first_order=True,
    first_dtype="float32",
):  # fmt: skip
    """A schema with features of every kind; table sizes are small, odd and uneven.

    `dtype`, `first_dtype`: of the tables of embeddings and of first-order weights; several take turns.
    """
    features, tables = [], []
    turns = {id(d): cycle([d] if isinstance(d, str) else d) for d in (dtype, first_dtype)}

    def table(name, rows, width, of=dtype):
        tables.append(Table(name=name, rows=rows, dim=width, dtype=next(turns[id(of)])))
        return name

    def first(name, rows):
        return table(f"{name}_w", rows, 1, first_dtype) if first_order else None

    for i in range(one_hot):
        rows, name = 3 + 7 * i, f"c{i}"
        scope = "context" if i < context else "candidate"
        features.append(
            Categorical(
                name=name,
                scope=scope,
                values="int",
                encoder=Identity(),
                table=table(name, rows, dim),
                first_order_table=first(name, rows),
                missing_id=0,
                oov_id=1,
            )
        )
    for i in range(bags):
        name = f"bag{i}"
        features.append(
            Categorical(
                name=name,
                scope="context" if i % 2 else "candidate",
                encoder=Hash(buckets=11, first_id=2),
                table=table(name, 13, dim),
                first_order_table=first(name, 13),
                missing_id=-1,
                max_values=4,
                pooling="mean" if i % 2 == 0 else "sum",
            )
        )
    for i in range(embedded_numbers):
        name = f"n{i}"
        features.append(
            Numeric(
                name=name,
                missing_value=0.0,
                scope="context" if i % 2 else "candidate",
                table=table(name, 1, dim),
                first_order_table=first(name, 1),
            )
        )
    for i in range(plain_numbers):
        features.append(Numeric(name=f"p{i}", scope="context" if i % 2 else "candidate", missing_value=0.0))
    return FeatureSchema(features=tuple(features), tables=tuple(tables))


def make_tables(schema, rng):
    return {t.name: (rng.standard_normal((t.rows, t.dim)) * 0.3).astype(np.float32) for t in schema.tables}


def make_scales(schema):
    """float32[dim] for each int8 table: uneven, and so small that some values of `make_tables` do not fit."""
    return {
        t.name: (0.003 + 0.0003 * ((7 * i + 3 * np.arange(t.dim)) % 11)).astype(np.float32)
        for i, t in enumerate(schema.tables)
        if t.dtype == "int8"
    }


def make_block(schema, rows, contexts, rng, *, wild=False):
    """Random ids and numbers. `wild`: some ids are far out of range, as a broken caller might send."""
    block = RowBlock.allocate(schema.block_layout, rows, contexts)
    block.request_of_row[:] = np.sort(rng.integers(0, contexts, rows))
    for f in schema.features:
        view = block.column(schema.columns[f.name])
        if not f.is_id:
            view[:] = rng.standard_normal(view.shape)
            continue
        ids = rng.integers(0, schema.table(f.table).rows, view.shape)
        if f.max_values > 1:
            ids[rng.random(view.shape) < 0.4] = -1
            if len(view) > 1:
                ids[0] = -1  # an empty bag
        elif wild:
            bad = np.array([-1, -7, np.iinfo(view.dtype).min, np.iinfo(view.dtype).max, schema.table(f.table).rows])
            hit = rng.random(view.shape) < 0.3
            ids[hit] = rng.choice(bad, int(hit.sum()))
        view[:] = ids  # into fewer bytes: -1 becomes all ones
    return block


def make_dense(schema, architecture, tasks, rng):
    """Random parameters under the documented names."""
    width = sum(1 if f.table is None else schema.table(f.table).dim for f in schema.features)
    dense, n = {}, width
    if isinstance(architecture, DCN | DCNv2):
        shape = (width,) if isinstance(architecture, DCN) else (width, width)
        for i in range(architecture.cross_layers):
            dense[f"cross.{i}.weight"] = rng.standard_normal(shape) / width
            dense[f"cross.{i}.bias"] = rng.standard_normal(width) * 0.1
    for i, units in enumerate(architecture.hidden_units):
        dense[f"deep.{i}.weight"] = rng.standard_normal((units, n)) / np.sqrt(n)
        dense[f"deep.{i}.bias"] = rng.standard_normal(units) * 0.1
        n = units
    if isinstance(architecture, DCN) or (isinstance(architecture, DCNv2) and architecture.structure == "parallel"):
        n += width
    dense["head.weight"] = rng.standard_normal((tasks, n)) / np.sqrt(n)
    dense["head.bias"] = rng.standard_normal(tasks) * 0.1
    return {k: v.astype(np.float32) for k, v in dense.items()}


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def feature_values(schema, tables, block, which="table"):
    """Per feature, float64[n, dim] of its table (`which="table"`) or its first-order term; features without it are left out."""
    out = []
    for f in schema.features:
        place = schema.columns[f.name]
        raw = block.column(place)
        if f.is_id:
            raw = np.where(raw == np.array(-1).astype(raw.dtype), -1, raw.astype(np.int64))
        if place.section.startswith("context"):
            raw = raw[block.request_of_row]
        name = f.table if which == "table" else f.first_order_table
        if name is None:
            if which == "table":
                out.append(raw.astype(np.float64))
            continue
        weight = tables[name].astype(np.float64)
        if not f.is_id:
            out.append(raw.astype(np.float64) * weight[0])
            continue
        value = np.zeros((block.rows, weight.shape[1]))
        for r in range(block.rows):
            vectors = []
            for id_ in raw[r].tolist():
                if id_ == -1 and f.max_values > 1:
                    continue
                vectors.append(weight[id_ if 0 <= id_ < len(weight) else f.oov_id])
            if vectors:
                value[r] = np.sum(vectors, 0) / (len(vectors) if f.pooling == "mean" else 1)
        out.append(value)
    return out


def first_order(schema, tables, block):
    return np.sum(feature_values(schema, tables, block, "first_order"), 0)


def scores(schema, architecture, dense, tables, block):
    """float64[n, tasks]."""
    p = {k: v.astype(np.float64) for k, v in dense.items()}
    parts = feature_values(schema, tables, block)
    x = np.concatenate(parts, 1)
    act = {"relu": lambda z: np.maximum(z, 0), "tanh": np.tanh, "sigmoid": sigmoid, "identity": lambda z: z}[
        architecture.activation
    ]
    xl = x
    if isinstance(architecture, DCN):
        for i in range(architecture.cross_layers):
            xl = x * (xl @ p[f"cross.{i}.weight"])[:, None] + p[f"cross.{i}.bias"] + xl
    if isinstance(architecture, DCNv2):
        for i in range(architecture.cross_layers):
            xl = x * (xl @ p[f"cross.{i}.weight"].T + p[f"cross.{i}.bias"]) + xl
    stacked = isinstance(architecture, DCNv2) and architecture.structure == "stacked"
    h = xl if stacked else x
    for i in range(len(architecture.hidden_units)):
        h = act(h @ p[f"deep.{i}.weight"].T + p[f"deep.{i}.bias"])
    joined = h if stacked or isinstance(architecture, WideDeep | DeepFM) else np.concatenate([xl, h], 1)
    logit = joined @ p["head.weight"].T + p["head.bias"]
    if isinstance(architecture, WideDeep | DeepFM):
        logit = logit + first_order(schema, tables, block)
    if isinstance(architecture, DeepFM):
        embedded = [v for f, v in zip(schema.features, parts, strict=True) if f.table is not None]
        for i in range(len(embedded)):
            for j in range(i):
                logit = logit + (embedded[i] * embedded[j]).sum(1, keepdims=True)
    return sigmoid(logit)
