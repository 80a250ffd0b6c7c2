"""graph.json: every model's graph survives it, and what would read beyond its values is refused before it runs."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.bundle.bundle import Provenance, read_bundle, write_bundle
from dpiframe_core.bundle.graph_file import graph_json, parse_graph
from dpiframe_core.errors import BundleError
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM, GraphFile, WideDeep
from dpiframe_core.graph.aten import AtenCall, Constant, Window
from dpiframe_core.graph.graph import Attrs, Graph, Node, Source
from dpiframe_core.models.build import build_graph
from tests import oracle
from tests.dpiframe_core.compiler.test_modules import compiled_of

pytestmark = pytest.mark.bulk

UNITS = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
ACTIVATIONS = st.sampled_from(["relu", "sigmoid", "tanh", "identity"])
ARCHITECTURES = st.one_of(
    st.builds(WideDeep, hidden_units=UNITS, activation=ACTIVATIONS),
    st.builds(DeepFM, hidden_units=UNITS, activation=ACTIVATIONS),
    st.builds(DCN, hidden_units=UNITS, cross_layers=st.integers(1, 4), activation=ACTIVATIONS),
    st.builds(DCNv2, hidden_units=UNITS, cross_layers=st.integers(1, 4), structure=st.sampled_from(["stacked", "parallel"])),
)


@given(ARCHITECTURES, st.sampled_from([1, 3, 16]), st.integers(0, 3))
def test_the_graph_of_every_model_survives_its_file(architecture, dim, plain_numbers):
    first = isinstance(architecture, WideDeep | DeepFM)
    schema = oracle.make_schema(dim=dim, first_order=first, plain_numbers=plain_numbers, bags=2)
    graph = build_graph(architecture, schema)
    assert parse_graph(graph_json(graph), schema, 1) == graph


@pytest.mark.parametrize("name", ["transformer", "normalised", "mixed"])
def test_a_compiled_graph_survives_its_file(name):
    _, schema, _, compiled = compiled_of(name)
    tasks = compiled.golden.scores.shape[1]
    assert parse_graph(graph_json(compiled.graph), schema, tasks) == compiled.graph


def graph_of(*nodes, widths, params=None, output="y"):
    return Graph(nodes, widths, params or {}, output)


SCHEMA = oracle.make_schema(dim=4, one_hot=1, bags=0, embedded_numbers=0, plain_numbers=1)
LOOKUP = Node("x", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=(Source("c0", "c0", 4),)))
SUM = Node("y", "sum", ("x",), ("y",), "m")


def aten(op, *operands, args=(), sizes=(), params=()):
    return Node("y", "aten", ("x",), ("y",), "m", params, Attrs(aten=AtenCall(op, operands, args, sizes)))


def as_read(graph):
    return parse_graph(graph_json(graph), SCHEMA, 1)


def test_a_small_graph_reads_as_it_was_written():
    graph = graph_of(LOOKUP, SUM, widths={"x": 4, "y": 1})
    assert as_read(graph) == graph


FM = Node("y", "fm", ("x",), ("y",), "m", attrs=Attrs(offset=2, fields=1, dim=4))
LINEAR = Node("y", "linear", ("x",), ("y",), "m", ("w",))
STRANGER = Node("y", "gather", ("x",), ("y",), "m")


@pytest.mark.parametrize(
    ("nodes", "widths", "params", "text"),
    [
        ((LOOKUP, STRANGER), {"x": 4, "y": 1}, {}, "graph node y: got op 'gather', expected one of lookup, concat"),
        ((LOOKUP, FM), {"x": 4, "y": 1}, {}, "graph node y: got columns 2 to 6 of widths [4], expected them within one value"),
        ((LOOKUP, LINEAR), {"x": 4, "y": 1}, {"w": (1, 5)}, "graph node y: got parameters [(1, 5)], expected [out, 4]"),
        ((LOOKUP, SUM), {"x": 5, "y": 1}, {}, "graph node x: got outputs of widths [5], expected one of 4"),
        ((LOOKUP, SUM), {"x": 4, "y": 2}, {}, "graph node y: got outputs of widths [2], expected one of 1"),
        ((LOOKUP, SUM), {"x": 4, "y": 1, "z": 1}, {}, "widths: got ['z'] that no node has, expected none"),
        ((LOOKUP, SUM), {"x": 4, "y": 1}, {"w": (1,)}, "params: got ['w'] that no node has, expected none"),
        ((LOOKUP, Node("x", "sum", ("x",), ("y",), "m")), {"x": 4, "y": 1}, {}, "got nodes ['x'] twice, expected"),
        (
            (Node("x", "lookup", (), ("x",), "e", attrs=Attrs(concat=(Source("c0", "c0_w", 4),))), SUM), {"x": 4, "y": 1}, {},
            "graph node x: got Source(feature='c0', table='c0_w', width=4), expected a table of the feature (or its",
        ),
        (
            (Node("x", "lookup", (), ("x",), "e", attrs=Attrs(concat=(Source("nobody", None, 4),))), SUM), {"x": 4, "y": 1}, {},
            "graph node x: got feature 'nobody', expected one of the schema",
        ),
        (
            (LOOKUP, Node("y", "sum", ("x",), ("y",), "m", attrs=Attrs(layers=1, columns=(9,), members=(SUM,)))),
            {"x": 4, "y": 1}, {},
            "graph node y: got attributes ['layers', 'columns', 'members'] on op 'sum', expected those of its own",
        ),
        (
            (LOOKUP, Node("y", "sum", ("x",), ("y",), "m", attrs=LOOKUP.attrs)), {"x": 4, "y": 1}, {},
            "graph node y: got attributes ['concat'] on op 'sum', expected those of its own",
        ),
        (
            (Node("x", "lookup", (), ("x",), "e", attrs=Attrs(LOOKUP.attrs.concat, splits=(1,))), SUM), {"x": 4, "y": 1}, {},
            "graph node x: got attributes ['splits'] on op 'lookup', expected those of its own",
        ),
        (
            (LOOKUP, Node("y", "activation", ("x",), ("y",), "m", attrs=Attrs(activation="eval"))), {"x": 4, "y": 4}, {},
            "graph node y: got activation 'eval', expected one of relu, sigmoid, tanh, identity",
        ),
    ],
)  # fmt: skip
def test_a_graph_that_does_not_fit_is_refused(nodes, widths, params, text):
    with pytest.raises(BundleError) as error:
        as_read(graph_of(*nodes, widths=widths, params=params))
    assert str(error.value).startswith(f"graph.json: {text}")


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (aten("aten.sum", Window(0, (4,), (1,), 1), args=((1,), False)),
         "got a window of columns 1 to 4, expected them within 4"),
        (aten("aten.sum", Window(0, (4,), (1,)), args=((0,), False)), "got dimension 0, expected 1 to 1: 0 is the batch"),
        (aten("aten.sum", Window(0, (4,), (-1,), 3), args=((1,), False)), "got a window of sizes (4,) and strides (-1,)"),
        (aten("aten.sum", Window(1, (4,), (1,)), args=((1,), False)), "got input 1, expected one of 1"),
        (aten("os.system", Window(0, (4,), (1,))),
         "got op 'os.system', expected one of the table in dpiframe_core/graph/aten_rules.py"),
        (aten("aten.relu", Window(0, (4,), (1,)), sizes=(2,)), "aten.relu: got sizes (2,), expected (4,)"),
        (aten("aten.relu", Constant(0), sizes=(4,)), "got parameter 0, expected one of 0"),
        (aten("aten.relu", Window(0, (4,), (1,)), args=(2,), sizes=(4,)), "got arguments (2,), expected 0 of the kinds ''"),
        (aten("aten.add", Window(0, (4,), (1,)), Window(0, (), ()), sizes=(4,)),
         "got sizes [(4,), ()], expected rows of one rank and constants of no higher one"),
        (aten("aten.index_select", Window(0, (4,), (1,)), args=(1, (4,)), sizes=(1,)), "got indices (4,), expected some"),
        (aten("aten.einsum", Window(0, (4,), (1,)), Window(0, (4,), (1,)), args=("bi,ci->b",)),
         "got 'bi,ci->b' for sizes (4,), expected 'b' first, and there alone, in values' terms"),
    ],
)  # fmt: skip
def test_a_generic_call_that_leaves_its_row_or_its_table_is_refused(node, text):
    from math import prod

    with pytest.raises(ValueError, match=r"^graph node y: ") as error:
        graph_of(LOOKUP, node, widths={"x": 4, "y": prod(node.attrs.aten.sizes)})
    assert text in str(error.value)


def test_a_sequence_is_read_as_wide_as_it_lies_in_memory():
    """Pooling "none" keeps `max_values` rows side by side: a graph that says the table's dim would read beyond its value."""
    features = [
        f.model_copy(update={"max_values": 3, "pooling": "none", "first_order_table": None}) for f in SCHEMA.features[:1]
    ]
    schema = FeatureSchema(features=tuple(features), tables=SCHEMA.tables[:1])
    narrow = graph_of(LOOKUP, SUM, widths={"x": 4, "y": 1})
    wide = graph_of(replace(LOOKUP, attrs=Attrs(concat=(Source("c0", "c0", 12),))), SUM, widths={"x": 12, "y": 1})
    assert parse_graph(graph_json(wide), schema, 1) == wide
    with pytest.raises(
        BundleError, match=r"graph node x: got Source\(.*width=4\), expected a table of the feature \(or its num"
    ):
        parse_graph(graph_json(narrow), schema, 1)


def test_a_file_of_another_form_is_refused():
    whole = json.loads(graph_json(graph_of(LOOKUP, SUM, widths={"x": 4, "y": 1})))
    for change, text in (
        ({"code": "import os"}, "graph.json: code: got 'import os', expected"),
        ({"output": 3}, "graph.json: output: got 3, expected a valid string"),
        ({"output": "z"}, "graph.json: "),
    ):
        with pytest.raises(BundleError) as error:
            parse_graph(json.dumps(whole | change).encode(), SCHEMA, 1)
        assert str(error.value).startswith(text)
    for data in (b"", b"{", b"[]", b"\xff", b'{"nodes": [], "widths": {}, "params": {}, "output": "y"}'):
        with pytest.raises(BundleError, match=r"^graph\.json: "):
            parse_graph(data, SCHEMA, 1)


def test_a_graph_without_its_file_and_a_file_without_its_graph_are_refused(tmp_path):
    made = compiled_of("stacked")[-1]
    parts = {
        "name": "t", "version": "1", "feature_schema": made.schema, "dense": made.dense, "tables": made.tables,
        "vocabularies": {}, "golden": made.golden, "provenance": Provenance(source="test"),
    }  # fmt: skip
    with pytest.raises(BundleError, match=r"files: got no graph\.json, expected every file that the schema needs"):
        write_bundle(tmp_path / "b", architecture=GraphFile(), **parts)
    with pytest.raises(BundleError, match=r"files: got 'graph\.json', expected only files that the schema needs"):
        write_bundle(tmp_path / "b", architecture=DeepFM(hidden_units=(4,)), graph=made.graph, **parts)


def test_a_bundle_checks_its_graph_as_it_is_read(tmp_path):
    compiled = compiled_of("two-tower")[-1]
    compiled.write(tmp_path / "b", name="t")
    assert read_bundle(tmp_path / "b").graph == compiled.graph
    file = tmp_path / "b" / "graph.json"
    file.write_bytes(file.read_bytes().replace(b'"aten.div"', b'"aten.mul"'))
    with pytest.raises(BundleError, match=r"b/graph\.json: got sha256 .* as model\.yaml says"):
        read_bundle(tmp_path / "b")
    file.unlink()
    with pytest.raises(BundleError, match=r"b/graph\.json: got no such file, expected it as model\.yaml lists it"):
        read_bundle(tmp_path / "b")
