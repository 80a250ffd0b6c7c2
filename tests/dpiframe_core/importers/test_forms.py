"""Forms of the models that only importers ask for, against their formulas in float64, fused and not, on every backend."""

import numpy as np
import pytest

from dpiframe_core.features.schema import Categorical, FeatureSchema
from dpiframe_core.fusion.passes import PASSES
from dpiframe_core.graph.architecture import DCN, DCNv2, WideDeep
from tests import oracle
from tests.backends import BACKENDS
from tests.runner import Model, table_tensors


def scores(architecture, schema, dense, held, block):
    """The oracle's formula, with a first-order logit or an outer bias where it has neither."""
    p = {k: v.astype(np.float64) for k, v in dense.items()}
    x = xl = np.concatenate(oracle.feature_values(schema, held, block), 1)
    for i in range(architecture.cross_layers):
        w, b = p[f"cross.{i}.weight"], p[f"cross.{i}.bias"]
        if isinstance(architecture, DCN):
            xl = x * (xl @ w)[:, None] + b + xl
        else:
            xl = x * (xl @ w.T) + b + xl if architecture.outer_bias else x * (xl @ w.T + b) + xl
    h = np.maximum(x @ p["deep.0.weight"].T + p["deep.0.bias"], 0)
    logit = np.concatenate([xl, h], 1) @ p["head.weight"].T + p["head.bias"]
    return oracle.sigmoid(logit + (oracle.first_order(schema, held, block) if architecture.first_order else 0))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("passes", [(), tuple(PASSES)], ids=["plain", "fused"])
@pytest.mark.parametrize(
    "architecture",
    [
        DCN(cross_layers=2, hidden_units=(9,), first_order=True),
        DCNv2(cross_layers=2, hidden_units=(9,), first_order=True),
        DCNv2(cross_layers=3, hidden_units=(9,), outer_bias=True),
        DCNv2(cross_layers=1, hidden_units=(9,), outer_bias=True, first_order=True),
    ],
    ids=["dcn-first-order", "dcnv2-first-order", "dcnv2-outer-bias", "both"],
)
def test_first_order_terms_and_an_outer_bias_of_cross_networks(architecture, passes, device):
    rng = np.random.default_rng(3)
    schema = oracle.make_schema(dim=4, bags=2)
    tensors, held = table_tensors(schema, oracle.make_tables(schema, rng))
    dense = oracle.make_dense(schema, architecture, 1, rng)
    block = oracle.make_block(schema, 33, 5, rng)
    model = Model(schema, architecture, dense, tensors, device, passes=passes)
    assert np.abs(model.scores(block) - scores(architecture, schema, dense, held, block)).max() <= 1e-5


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("passes", [(), tuple(PASSES)], ids=["plain", "fused"])
@pytest.mark.parametrize(("pooling", "first"), [("mean", "sum"), ("sum", "mean"), ("max", "sum")])
def test_first_order_weights_may_be_pooled_in_their_own_way(pooling, first, passes, device):
    rng = np.random.default_rng(4)
    made = oracle.make_schema(dim=4, bags=2)
    features = tuple(
        f.model_copy(update={"pooling": pooling, "first_order_pooling": first}) if f.max_values > 1 else f
        for f in made.features
    )
    schema = FeatureSchema(features=features, tables=made.tables)
    tensors, held = table_tensors(schema, oracle.make_tables(schema, rng))
    architecture = WideDeep(hidden_units=(9,))
    dense = oracle.make_dense(schema, architecture, 1, rng)
    block = oracle.make_block(schema, 33, 5, rng)

    def as_if(how):
        """The schema to the oracle, which knows sum and mean: each feature pooled in one way."""
        return FeatureSchema(features=tuple(pooled(f, how) for f in made.features), tables=made.tables)

    def pooled(f, how):
        return f.model_copy(update={"pooling": how}) if isinstance(f, Categorical) and f.max_values > 1 else f

    p = {k: v.astype(np.float64) for k, v in dense.items()}
    values = oracle.feature_values(as_if("sum" if pooling == "max" else pooling), held, block)
    if pooling == "max":
        values = [largest(schema, held, block, f) if f.max_values > 1 else v for f, v in zip(features, values, strict=True)]
    h = np.maximum(np.concatenate(values, 1) @ p["deep.0.weight"].T + p["deep.0.bias"], 0)
    logit = h @ p["head.weight"].T + p["head.bias"] + oracle.first_order(as_if(first), held, block)
    model = Model(schema, architecture, dense, tensors, device, passes=passes)
    assert np.abs(model.scores(block) - oracle.sigmoid(logit)).max() <= 1e-5


def largest(schema, held, block, f):
    """float64[n, dim]: the maximum over the rows of a list's ids, zero of none."""
    place = schema.columns[f.name]
    section = "context_ids" if place.section == "context_ids" else "candidate_ids"
    ids = block.wide_ids(section)[:, place.start : place.start + place.width]
    ids = ids[block.request_of_row] if section == "context_ids" else ids
    weight = held[f.table]
    return np.stack([weight[row[row >= 0]].max(0) if (row >= 0).any() else np.zeros(weight.shape[1]) for row in ids])
