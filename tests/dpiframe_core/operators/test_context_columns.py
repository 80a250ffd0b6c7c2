"""Which columns of DIN's lookup are written but once a context."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.architecture import DIN, TargetAttention, WideDeep
from dpiframe_core.models.build import build_graph
from dpiframe_core.operators.context_shares import context_columns
from tests import model_oracle


def unit(number=0, **options):
    return TargetAttention(targets=(f"c{number}",), sequences=(f"s{number}",), hidden_units=(4,), **options)


def built(architecture, **schema):
    schema = model_oracle.make_schema(**schema)
    graph = fuse(build_graph(architecture, schema, 1))
    (lookup,) = (n for n in graph.nodes if n.op == "lookup")
    return graph, lookup, schema


def columns(architecture, **schema):
    return context_columns(*built(architecture, **schema))


def test_the_history_of_a_context_and_its_mask_are_written_once():
    # Four categories of dim 8, ten items, two numbers, the mask.
    assert columns(DIN(attention=(unit(),), hidden_units=(4,)), sequences=(10,), numbers=2) == ((32, 112), (114, 124))


def test_without_a_mask_the_keys_alone_are():
    assert columns(DIN(attention=(unit(masked=False),), hidden_units=(4,)), sequences=(10,)) == ((32, 112),)


def test_a_history_that_a_second_attention_reads_behind_the_first_is_written_in_each_row():
    """The first passes it on; its own is the context's."""
    assert columns(DIN(attention=(unit(), unit(1)), hidden_units=(4,)), sequences=(10, 3)) == ((32, 112), (136, 146))


def test_a_history_of_the_candidate_is_written_in_each_row():
    assert columns(DIN(attention=(unit(1), unit()), hidden_units=(4,)), sequences=(10, 3)) == ()


@pytest.mark.parametrize("schema", [{}, {"numbers": 2}])
def test_what_others_read_is_written_in_each_row(schema):
    assert columns(WideDeep(hidden_units=(4,)), first_order=True, **schema) == ()


def test_keys_that_are_sums_of_several_ids_are_written_in_each_row(monkeypatch):
    graph, lookup, schema = built(DIN(attention=(unit(masked=False),), hidden_units=(4,)), sequences=(10,))
    assert context_columns(graph, lookup, schema)
    monkeypatch.setattr(FeatureSchema, "pooling", lambda *_: "mean")
    assert context_columns(graph, lookup, schema) == ()


def test_keys_that_are_numbers_are_written_in_each_row(monkeypatch):
    """Their columns are a number's times a table's row: no id of the context's tells what they are."""
    graph, lookup, schema = built(DIN(attention=(unit(masked=False),), hidden_units=(4,)), sequences=(10,))
    places = {name: replace(at, section="context_dense") for name, at in schema.columns.items() if name == "s0"}
    monkeypatch.setitem(schema.__dict__, "columns", dict(schema.columns) | places)
    assert context_columns(graph, lookup, schema) == ()


def test_keys_that_are_a_part_of_a_feature_are_written_in_each_row():
    graph, lookup, schema = built(DIN(attention=(unit(masked=False),), hidden_units=(4,)), sequences=(10,))
    (reader,) = graph.consumers()[lookup.outputs[0]]
    at = reader.attrs.attended
    fewer = SimpleNamespace(op="attention", attrs=SimpleNamespace(attended=replace(at, length=at.length - 1)))
    less = SimpleNamespace(consumers=lambda: {lookup.outputs[0]: [fewer]}, output=graph.output)
    assert context_columns(less, lookup, schema) == ()
