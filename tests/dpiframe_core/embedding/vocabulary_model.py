"""A small DeepFM whose ids come from vocabularies and raw integers, for what renumbers them."""

import numpy as np
import torch

from dpiframe_core.bundle.bundle import Golden, Provenance, write_bundle
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table, Vocabulary
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.graph.architecture import DeepFM
from tests import oracle

ARCHITECTURE = DeepFM(hidden_units=(8,))
ITEMS, USERS, SHOPS = 300, 40, 25  # item ids need two bytes, and one once they are pruned by a half


def make_schema():
    """`item` and the list `seen` share a table and a vocabulary, `shop` has raw ids, `rank` is a number."""

    def feature(name, table, **options):
        return Categorical(name=name, table=table, first_order_table=f"{table}_w", **{"missing_id": 0, "oov_id": 1, **options})

    features = (
        feature("user", "user", scope="context", encoder=Vocabulary(), values="int"),
        feature("item", "item", encoder=Vocabulary(file="items")),
        feature("seen", "item", encoder=Vocabulary(file="items"), max_values=4, pooling="mean", missing_id=-1, scope="context"),
        feature("shop", "shop", encoder=Identity(out_of_range="oov"), values="int", oov_id=SHOPS - 1, missing_id=3),
        Numeric(name="rank", missing_value=0.0, table="rank", first_order_table="rank_w"),
    )
    sizes = {"user": USERS, "item": ITEMS, "shop": SHOPS, "rank": 1}
    tables = [Table(name=f"{name}{end}", rows=n, dim=dim) for name, n in sizes.items() for end, dim in (("", 8), ("_w", 1))]
    return FeatureSchema(features=features, tables=tuple(tables))


def make_vocabularies():
    """Ids 0 and 1 are of null and of unknown values; two words have the last item's id."""
    items = {f"i{n}": n for n in range(2, ITEMS)} | {"last": ITEMS - 1}
    return {"items": VocabularyTable.of(items), "user": VocabularyTable.of({100 + n: n for n in range(2, USERS)})}


def make_rows(rows, seed):
    """Raw columns; low ids are frequent, some values are null or unknown."""
    rng = np.random.default_rng(seed)

    def ids(n, count):
        frequent, any_ = (rng.pareto(1.0, count) * 3).astype(int), rng.integers(0, n, count)
        return np.where(rng.random(count) < 0.3, any_, np.minimum(frequent, n - 1)).tolist()

    items = [None if n == 0 else "new" if n == 1 else f"i{n}" for n in ids(ITEMS, rows)]
    return {
        "user": [None if n == 0 else 100 + n for n in ids(USERS, rows)],
        "item": items,
        "seen": [[f"i{n}" for n in ids(ITEMS, int(rng.integers(0, 5)))] for _ in range(rows)],
        "shop": [None if n == 4 else n for n in ids(SHOPS + 5, rows)],
        "rank": rng.standard_normal(rows).round(3).tolist(),
    }


def write_model(path, schema=None, vocabularies=None, **options):
    """Writes a bundle whose golden scores come from the float64 oracle."""
    schema, rng = schema or make_schema(), np.random.default_rng(11)
    tables, dense = oracle.make_tables(schema, rng), oracle.make_dense(schema, ARCHITECTURE, 1, rng)
    block = oracle.make_block(schema, 40, 7, rng)
    scores = oracle.scores(schema, ARCHITECTURE, dense, tables, block).astype(np.float32)
    return write_bundle(
        path, name="words", version="1", architecture=ARCHITECTURE, feature_schema=schema,
        dense={k: torch.from_numpy(v) for k, v in dense.items()}, tables={k: torch.from_numpy(v) for k, v in tables.items()},
        vocabularies=make_vocabularies() if vocabularies is None else vocabularies, golden=Golden(block, scores),
        provenance=Provenance(source="test"), **options,
    )  # fmt: skip
