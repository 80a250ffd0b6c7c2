"""Fusion keeps every graph's values: random graphs, each pass alone and all together, against no fusion at all."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.fusion import passes as fusion
from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.interactions import dot, mixture
from dpiframe_core.graph.schedule import breadth_first
from dpiframe_core.operators.cpu import CpuOperators
from tests import oracle
from tests.runner import table_tensors

SCHEMA = oracle.make_schema(dim=4, one_hot=3, context=1, bags=1, embedded_numbers=1, plain_numbers=1)
TENSORS, _ = table_tensors(SCHEMA, oracle.make_tables(SCHEMA, np.random.default_rng(0)))
OPS = ["concat", "sum", "add", "mul", "linear", "activation", "bias", "cross_v1", "dot", "mixture", "cross_low_rank"]
BLOCK = oracle.make_block(SCHEMA, 7, 3, np.random.default_rng(1))


def random_graph(r: random.Random) -> Graph:
    """Any composition of the primitive operators, with the fusable patterns and near misses of them likely."""
    g = GraphBuilder(SCHEMA)
    names = (f"v{i}" for i in range(10_000))
    vals = [g.lookup(f.name, f.table, next(names), "m") for f in SCHEMA.features]
    vals += [g.lookup(f.name, f.first_order_table, next(names), "m") for f in SCHEMA.features if f.first_order_table]
    vals = r.sample(vals, r.randint(2, len(vals)))
    vals.append(g.concat(r.sample(vals, r.randint(2, len(vals))), next(names), "m"))
    for _ in range(r.randint(2, 10)):
        a = r.choice(vals[-5:] if r.random() < 0.6 else vals)
        width = g.width(a)
        same, ones = [v for v in vals if g.width(v) == width], [v for v in vals if g.width(v) == 1]
        match r.choice([*OPS, "cross_v2"]):
            case "concat":
                v = g.concat([r.choice(vals) for _ in range(r.randint(2, 3))], next(names), "m")
            case "sum":
                v = g.sum(a, next(names), "m")
            case "add":
                v = g.add([r.choice(same) for _ in range(r.randint(2, 3))], next(names), "m")
            case "mul":
                v = g.mul(a, r.choice(same + ones), next(names), "m")
            case "linear":
                v = g.linear(a, r.choice([1, 2, width]), next(names), "m", bias=r.random() < 0.7)
            case "activation":
                kind = r.choice(["relu", "tanh", "sigmoid", "gelu", "leaky_relu", "prelu", "dice"])
                v = g.activation(a, kind, name := next(names), "m", prefix=name, slope=0.2)
            case "dot" if width < 40:
                dim = r.choice([d for d in range(1, width + 1) if width % d == 0])
                v = dot(g, [a] if r.random() < 0.5 else [a, a], dim, next(names), "m", keep=r.randint(1, width))
            case "mixture":
                v = mixture(g, g.linear(a, 6, next(names), "m"), g.linear(a, 3, next(names), "m"), next(names), "m")
            case "cross_low_rank":
                p = g.linear(g.linear(a, 2, next(names), "m", bias=False), width, next(names), "m")
                v = g.add([g.mul(r.choice(same), p, next(names), "m"), r.choice(same)], next(names), "m")
            case "bias":
                v = g.bias(a, next(names), next(names), "m")
            case "cross_v1":
                v = a
                for _ in range(r.randint(1, 3)):
                    vector = r.random() < 0.7
                    s = g.linear(v, 1 if vector else r.choice([1, width]), next(names), "m", bias=False, vector=vector)
                    v = g.add([g.bias(g.mul(a, s, next(names), "m"), next(names), next(names), "m"), v], next(names), "m")
                    if r.random() < 0.3:
                        vals.append(v)
            case _:
                p = g.linear(a, width, next(names), "m")
                p = g.activation(p, r.choice(["identity", "identity", "tanh"]), next(names), "m")
                v = g.add([g.mul(r.choice(same), p, next(names), "m"), a], next(names), "m")
        vals.append(v)
    if r.random() < 0.3:
        return g.finish(vals[-1])
    logit = g.linear(g.concat([r.choice(vals) for _ in range(r.randint(1, 3))], next(names), "m"), 1, next(names), "m")
    logit = g.activation(logit, r.choice(["identity", "identity", "relu"]), next(names), "m")
    extra = [r.choice(ones) for ones in [[v for v in vals if g.width(v) == 1]] * r.randint(0, 3) if ones]
    return g.finish(g.activation(g.add([logit, *extra], next(names), "m"), "sigmoid", next(names), "m"))


def values_of(graph: Graph, dense: dict[str, torch.Tensor]) -> np.ndarray:
    operators = CpuOperators(graph, SCHEMA, EmbeddingStore(SCHEMA, TENSORS, torch.device("cpu")), dense)
    return CpuLane(operators, breadth_first(graph, 4), SCHEMA.block_layout, graph).run([BLOCK]).scores


@pytest.mark.bulk
@given(st.integers(0, 2**32))
def test_no_pass_changes_what_a_graph_computes(seed):
    graph = random_graph(random.Random(seed))
    rng = np.random.default_rng(seed)
    dense = {k: torch.from_numpy((rng.standard_normal(s) * 0.3).astype(np.float32)) for k, s in graph.params.items()}
    want = values_of(graph, dense)
    for passes in [*((p,) for p in PASSES), tuple(PASSES)]:
        got = values_of(fuse(graph, passes), dense)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * max(1.0, float(np.abs(want).max())), err_msg=str(passes))


def test_fusion_gives_the_head_kernel_no_more_than_it_takes():
    from kernels.dense import head

    assert (fusion.MAX_PARTS, fusion.MAX_LOGITS) == (head.MAX_PARTS, head.MAX_LOGITS)


def test_an_unknown_pass_is_refused():
    with pytest.raises(ValueError, match=r"fusion passes: got \['magic'\], expected some of"):
        fuse(random_graph(random.Random(0)), ("magic",))
