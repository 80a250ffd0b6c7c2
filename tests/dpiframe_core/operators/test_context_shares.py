"""Which columns of a lookup are multiplied once a context, and by which layers."""

import pytest
import torch

from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph.architecture import DCN, DIN, DCNv2, DeepFM, TargetAttention, WideDeep, XDeepFM
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.build import build_graph
from dpiframe_core.operators.context_shares import ContextShares, context_shares
from tests import model_oracle, oracle

UNITS = (24, 8)


def shares(architecture, schema, dtype=torch.float32, passes=tuple(PASSES)):
    return context_shares(group_waves(place(fuse(build_graph(architecture, schema), passes))), schema, dtype)


def schema_of(first_order=True, **options):
    return oracle.make_schema(**{"one_hot": 14, "context": 9, "first_order": first_order} | options)


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        (WideDeep(hidden_units=UNITS), {"deep.0"}),
        (DeepFM(hidden_units=UNITS), {"deep.0"}),
        (XDeepFM(cin_units=(4,), hidden_units=UNITS), {"deep.0"}),
        (DCN(cross_layers=2, hidden_units=UNITS), {"deep.0"}),
        (DCNv2(cross_layers=2, hidden_units=UNITS), {"cross.0", "deep.0"}),
        (DCNv2(cross_layers=2, rank=4, hidden_units=UNITS), {"cross.0.v", "deep.0"}),
        (DCNv2(cross_layers=2, hidden_units=UNITS, structure="stacked"), {"cross.0"}),
    ],
)
def test_every_layer_that_reads_the_lookup_shares_the_columns_of_a_context(architecture, layers):
    # Nine features of a context, 16 columns each: 144 columns, of which 128 are whole chunks.
    assert shares(architecture, schema_of()) == ContextShares("lookup", (0, 128), frozenset(layers))
    assert shares(architecture, schema_of(), torch.bfloat16) == ContextShares("lookup", (0, 128), frozenset(layers))


def test_the_most_columns_that_lie_side_by_side_are_shared_in_whole_chunks():
    schema = schema_of(context=5)
    features = sorted(schema.features, key=lambda f: f.name not in ("c6", "c7"))  # of the candidate, ahead of the context's
    ahead = schema.model_copy(update={"features": tuple(features)})
    assert shares(WideDeep(hidden_units=UNITS), ahead).columns == (32, 96)
    assert shares(WideDeep(hidden_units=UNITS), ahead, torch.bfloat16) is None


@pytest.mark.parametrize("options", [{"context": 0}, {"context": 1}, {"context": 2, "one_hot": 30}])
def test_few_columns_or_none_are_multiplied_with_the_rest(options):
    assert shares(WideDeep(hidden_units=UNITS), schema_of(**options)) is None


def test_what_reads_no_lookup_shares_nothing():
    unit = TargetAttention(targets=("c0",), sequences=("s0",), hidden_units=(4,))
    schema = model_oracle.make_schema(sequences=(10,))
    assert shares(DIN(attention=(unit,), hidden_units=(4,)), schema) is None
    assert shares(WideDeep(hidden_units=UNITS), schema_of(), passes=[p for p in PASSES if p != "lookup"]) is None
