"""Recurrences built as nodes: DIEN's gates as its paper has them, through an engine's operators; and what does not fit."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from dpiframe_core.bundle.graph_file import graph_json, parse_graph
from dpiframe_core.compiler.examples import example_block
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.program import cuda_programs
from dpiframe_core.errors import BundleError
from dpiframe_core.features.schema import FeatureSchema, Numeric, Table
from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Attrs, Node
from dpiframe_core.graph.recurrence import Recurrence, check_recurrence, param_shapes
from dpiframe_core.graph.schedule import breadth_first
from dpiframe_core.operators.cpu import CpuOperators
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.modules import categorical
from tests.kernels.recurrent.cells import sigmoid

STEPS, DIM, HIDDEN, ITEMS, ROWS = 4, 3, 5, 9, 21
SCHEMA = FeatureSchema(
    features=(
        *(categorical(f"item{t}", "item") for t in range(STEPS)),
        *(Numeric(name=f"attention{t}", scope="candidate") for t in range(STEPS)),
    ),
    tables=(Table(name="item", rows=ITEMS, dim=DIM),),
)


def recurrent(g, op, values, r, name, offset):
    """A node of a layer whose parameters are named as torch names them."""
    names = [f"{name}.weight_ih", f"{name}.weight_hh", f"{name}.bias_ih", f"{name}.bias_hh"]
    shapes = param_shapes(op, r)
    params = tuple(g.param(own, shape) for own, shape in zip(names, shapes, strict=True))
    width = check_recurrence(op, r, offset, [g.width(v) for v in values], shapes)
    return g.node(Node(name, op, tuple(values), (name,), "gru", params, Attrs(recurrence=r, offset=offset)), width)


def graph_of(gate):
    """sigmoid of a linear layer of all hidden states, over the items, whose columns follow one that is not theirs."""
    g = GraphBuilder(SCHEMA)
    values = [g.concat([g.lookup(f"item{t}", "item", f"x{t}", "embedding") for t in range(STEPS)], "x", "embedding")]
    if gate != "none":
        numbers = [g.lookup(f"attention{t}", None, f"a{t}", "embedding") for t in range(STEPS)]
        numbers = g.concat(numbers, "a", "embedding")
        values.append(g.linear(numbers, STEPS - 1, "first", "attention", bias=False))
    h = recurrent(g, "gru", values, Recurrence(STEPS - 1, DIM, HIDDEN, gate=gate), "evolution", DIM)
    return g.finish(g.activation(g.linear(h, 1, "head", "head"), "sigmoid", "score", "head"))


def dien(x, a, cell, gate):
    """h_t of Zhou et al. 2019, eq. 12 to 14, with an update gate u (not 1 - u): gates of `cell` u, r, n one above the other."""
    w, u, b, c = (t.double().numpy() for t in cell)
    h, states = np.zeros((len(x), HIDDEN)), []
    for t in range(x.shape[1]):
        of_x, of_h = np.split(x[:, t] @ w.T + b, 3, 1), np.split(h @ u.T + c, 3, 1)
        n = np.tanh(of_x[2] + sigmoid(of_x[1] + of_h[1]) * of_h[2])
        update, at = sigmoid(of_x[0] + of_h[0]), a[:, t, None]
        update = {"none": update, "scaled": at * update, "replaced": at + 0 * update}[gate]
        h = (1 - update) * h + update * n
        states.append(h)
    return np.concatenate(states, 1)


def as_the_node_has_them(t, gate):
    """Rows u, r, n as r, z = 1 - u, n: sigmoid(-v) is 1 - sigmoid(v); no z where u is replaced."""
    u, r, n = t.chunk(3)
    return torch.cat([r, n] if gate == "replaced" else [r, -u, n])


def scores(graph, tables, dense, block, device):
    store = EmbeddingStore(SCHEMA, tables, torch.device(device))
    if device == "cpu":
        lane = CpuLane(CpuOperators(graph, SCHEMA, store, dense), breadth_first(graph), SCHEMA.block_layout, graph)
    else:
        programs = cuda_programs(graph, SCHEMA, store, dense, "fp32", "waves", 1)
        lane = CudaLane(programs, SCHEMA.block_layout, (64,), "fp32", store.device, {})
    lane.prepare()
    return lane.run([block]).scores


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("passes", [(), tuple(PASSES)], ids=["unfused", "fused"])
@pytest.mark.parametrize("gate", ["none", "scaled", "replaced"])
def test_diens_gates_are_what_its_paper_says(gate, passes, device):
    rng = torch.Generator().manual_seed(3)

    def made(*shape):
        return torch.randn(*shape, generator=rng)

    cell = [made(3 * HIDDEN, DIM), made(3 * HIDDEN, HIDDEN), made(3 * HIDDEN), made(3 * HIDDEN)]
    names = ["evolution.weight_ih", "evolution.weight_hh", "evolution.bias_ih", "evolution.bias_hh"]
    dense = {name: as_the_node_has_them(t, gate) for name, t in zip(names, cell, strict=True)}
    dense |= {"head.weight": made(1, (STEPS - 1) * HIDDEN), "head.bias": made(1), "first.weight": torch.eye(STEPS)[:-1]}
    values = {f"item{t}": torch.randint(0, ITEMS, (ROWS,), generator=rng) for t in range(STEPS)}
    values |= {f"attention{t}": torch.rand(ROWS, generator=rng) for t in range(STEPS)}
    table, graph = made(ITEMS, DIM), graph_of(gate)
    assert parse_graph(graph_json(graph), SCHEMA, 1) == graph
    items = torch.stack([table[values[f"item{t}"]] for t in range(1, STEPS)], 1).double().numpy()
    a = torch.stack([values[f"attention{t}"] for t in range(STEPS - 1)], 1).double().numpy()
    logits = dien(items, a, cell, gate) @ dense["head.weight"].double().numpy().T + dense["head.bias"].double().numpy()
    block = example_block(SCHEMA, values, {})
    got = scores(fuse(graph, passes), {"item": table}, dense, block, device)
    np.testing.assert_allclose(got, sigmoid(logits), rtol=0, atol=4e-6)
    assert got.std() > 0.05


PLAIN = Recurrence(3, 2, 4)


@pytest.mark.parametrize(
    ("op", "r", "offset", "widths", "text"),
    [
        ("gru", None, 0, [6], "got None, expected a recurrence of one step and column or more in one or two directions"),
        ("gru", replace(PLAIN, steps=0), 0, [6], "got Recurrence(steps=0, "),
        ("gru", replace(PLAIN, directions=3), 0, [6], "got Recurrence(steps=3, inputs=2, hidden=4, directions=3, "),
        ("gru", replace(PLAIN, hidden=257), 0, [6], "got 2 columns and 257 hidden ones, expected at most 1024 and 256"),
        ("gru", replace(PLAIN, cell=True), 0, [6], "got Recurrence("),
        ("lstm", replace(PLAIN, gate="scaled"), 0, [6, 3], "got Recurrence("),
        ("gru", PLAIN, 1, [6], "got columns 1 to 7 of widths [6], expected them within one value, and [] of others"),
        ("gru", PLAIN, -1, [6], "got columns -1 to 5 of widths [6]"),
        ("gru", PLAIN, 0, [6, 3], "got columns 0 to 6 of widths [6, 3], expected them within one value, and [] of others"),
        (
            "gru",
            replace(PLAIN, gate="scaled"),
            0,
            [6, 2],
            "got columns 0 to 6 of widths [6, 2], expected them within",
        ),
    ],
)
def test_a_recurrence_that_does_not_fit_is_refused(op, r, offset, widths, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        check_recurrence(op, r, offset, widths, param_shapes(op, r) if r else ())


def test_parameters_of_other_shapes_are_refused():
    shapes = param_shapes("gru", PLAIN)
    assert shapes == ((12, 2), (12, 4), (12,), (12,))
    assert param_shapes("lstm", replace(PLAIN, directions=2, biases=False)) == ((16, 2), (16, 4)) * 2
    assert check_recurrence("gru", PLAIN, 0, [6], shapes) == 12
    with pytest.raises(ValueError, match=re.escape("got parameters [(12, 2)], expected [(12, 2), (12, 4), (12,), (12,)]")):
        check_recurrence("gru", PLAIN, 0, [6], shapes[:1])


def test_a_node_of_a_file_is_held_against_its_values():
    graph = graph_of("scaled")
    nodes = tuple(replace(n, attrs=replace(n.attrs, offset=1 + DIM)) if n.op == "gru" else n for n in graph.nodes)
    with pytest.raises(BundleError, match=re.escape("graph.json: graph node evolution: got columns 4 to 13 of widths [12, 3]")):
        parse_graph(graph_json(replace(graph, nodes=nodes)), SCHEMA, 1)
