"""Properties of every scheduling policy on random graphs, and that the executor runs a plan's steps and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.architecture import DCNv2, DeepFM
from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.graph.schedule import POLICIES, Plan, Step, breadth_first, depth_first, sequential
from dpiframe_core.models.build import build_graph
from dpiframe_core.operators.executor import execute, last_reads
from tests import oracle
from tests.runner import Model, table_tensors


@st.composite
def graphs(draw):
    """node -> earlier nodes it reads from, at most 14 nodes."""
    n = draw(st.integers(1, 14))
    return {
        f"n{i}": tuple(f"n{j}" for j in sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else () for i in range(n)
    }


def happens_before(plan: Plan) -> dict[str, set[str]]:
    """node -> the nodes sure to be done before it starts, from streams and events alone."""
    done_on_stream: dict[int, set[str]] = {}
    known_at_event: dict[int, set[str]] = {0: set()}
    before = {}
    for step in plan.steps:
        known = done_on_stream.setdefault(step.stream, set())
        for event in step.waits:
            known |= known_at_event[event]  # KeyError: waits for an event not yet recorded
        before[step.node] = set(known)
        known.add(step.node)
        if step.records is not None:
            known_at_event[step.records] = set(known)
    end = set(done_on_stream.get(0, set()))
    for event in plan.joins:
        end |= known_at_event[event]
    before["end"] = end
    return before


@given(graphs(), st.sampled_from(sorted(POLICIES)), st.integers(1, 5))
def test_every_operator_runs_once_after_its_inputs_and_all_streams_are_joined(graph, policy, max_streams):
    plan = POLICIES[policy](graph, max_streams)
    assert sorted(s.node for s in plan.steps) == sorted(graph)
    before = happens_before(plan)
    for node, inputs in graph.items():
        assert set(inputs) <= before[node]
    assert before["end"] == set(graph)
    assert plan.streams <= max_streams
    assert {s.stream for s in plan.steps} == set(range(plan.streams))


@given(graphs(), st.sampled_from(["breadth_first", "depth_first"]), st.integers(2, 5))
def test_side_streams_are_forked_from_the_callers_stream(graph, policy, max_streams):
    """A captured side stream must begin with a wait, or capture fails."""
    plan = POLICIES[policy](graph, max_streams)
    for stream in range(1, plan.streams):
        first = next(s for s in plan.steps if s.stream == stream)
        assert first.waits


@given(graphs(), st.integers(1, 5))
def test_no_event_is_recorded_that_nobody_waits_for(graph, max_streams):
    plan = breadth_first(graph, max_streams)
    waited = {e for s in plan.steps for e in s.waits} | set(plan.joins)
    assert {s.records for s in plan.steps if s.records is not None} == waited - {0}
    assert plan.events == 1 + len(waited - {0})


@given(graphs(), st.integers(1, 5))
def test_breadth_first_issues_level_by_level(graph, max_streams):
    levels = [s.level for s in breadth_first(graph, max_streams).steps]
    assert levels == sorted(levels)


def two_branches():
    return {
        "lookup": (),
        "a1": ("lookup",),
        "b1": ("lookup",),
        "a2": ("a1",),
        "b2": ("b1",),
        "a3": ("a2",),
        "head": ("a3", "b2"),
    }


def test_breadth_first_starts_both_branches_before_either_goes_on():
    order = [s.node for s in breadth_first(two_branches(), 4).steps]
    assert order == ["lookup", "a1", "b1", "a2", "b2", "a3", "head"]


def test_depth_first_finishes_one_branch_before_the_other_begins():
    order = [s.node for s in depth_first(two_branches(), 4).steps]
    assert order == ["lookup", "a1", "a2", "a3", "b1", "b2", "head"]


def test_the_longest_branch_keeps_the_stream_of_the_lookup_and_of_the_head():
    stream = {s.node: s.stream for s in breadth_first(two_branches(), 4).steps}
    assert {stream[n] for n in ("lookup", "a1", "a2", "a3", "head")} == {0}
    assert {stream["b1"], stream["b2"]} == {1}


def test_sequential_uses_one_stream_and_no_events():
    plan = sequential(two_branches())
    assert (plan.streams, plan.joins, {s.waits for s in plan.steps}) == (1, (), {()})


def test_max_streams_below_one_is_refused():
    with pytest.raises(ValueError, match="max_streams: got 0, expected at least 1"):
        breadth_first(two_branches(), 0)


@given(st.randoms())
def test_the_executor_runs_the_steps_of_the_plan_in_their_order_and_nothing_else(random):
    names = list(two_branches())
    random.shuffle(names)
    plan = Plan(tuple(Step(n, 0, 0) for n in names), 1, 1, (), "made up")
    ran = []
    execute(plan, {n: (lambda values, n=n: ran.append(n)) for n in names}, {})
    assert ran == names


def test_values_go_after_their_last_reader_and_the_output_stays():
    nodes = [("a", (), ("x", "unread")), ("b", ("x",), ("y",)), ("c", ("x", "y"), ("out",)), ("d", ("out",), ("more",))]
    widths = {o: 1 for _, _, outs in nodes for o in outs}
    graph = Graph(tuple(Node(n, "add", ins, outs, "m") for n, ins, outs in nodes), widths, {}, "out")
    plan, seen = Plan(tuple(Step(n, 0, 0) for n, _, _ in nodes), 1, 1, (), "made up"), {}

    def operator(name, outputs):
        def run(values):
            seen[name] = set(values)
            values.update(dict.fromkeys(outputs, torch.empty(0)))

        return run

    values = {}
    execute(plan, {n: operator(n, outs) for n, _, outs in nodes}, values, last_reads(plan, graph))
    assert seen == {"a": set(), "b": {"x"}, "c": {"x", "y"}, "d": {"out"}}
    assert set(values) == {"out"}


def test_a_model_whose_plan_lacks_a_step_does_not_run():
    """Nothing runs beside the plan: without the lookup's step there is no input."""
    rng = np.random.default_rng(0)
    architecture, schema = DCNv2(cross_layers=1, hidden_units=(4,)), oracle.make_schema(first_order=False)
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, rng))
    model = Model(schema, architecture, oracle.make_dense(schema, architecture, 1, rng), tensors, "cpu",
                  plan=lambda g: Plan(sequential(g).steps[1:], 1, 1, (), "cut"))  # fmt: skip
    with pytest.raises(KeyError, match="x"):
        model.scores(oracle.make_block(schema, 2, 1, rng))


def test_the_plan_of_deepfm_puts_fm_beside_the_mlp():
    plan = breadth_first(fuse(build_graph(DeepFM(hidden_units=(8, 4)), oracle.make_schema())))
    by_node = {s.node: s for s in plan.steps}
    assert by_node["fm"].stream != by_node["deep.0"].stream
    assert by_node["fm"].level == by_node["deep.0"].level
