"""The picture of a plan as plain data: nothing lies on anything else, every label fits, a screen shows every page."""

from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from dpiframe_core.describe.label_text import text_width
from dpiframe_core.describe.launch_box import DETAIL, NAME
from dpiframe_core.describe.plan_launches import Launch, Operator, launches
from dpiframe_core.describe.plan_layout import MOST_WIDTH, plan_layout
from dpiframe_core.describe.plan_plot import plan_sections, section_places
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.schedule import POLICIES, breadth_first, levels
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.build import build_graph
from tests import model_oracle
from tests.dpiframe_core.models.test_library_models import CASES


def plan_of(edges, operators, streams=4, policy=breadth_first):
    """Launches of one operator each; edges: target -> sources."""
    before = {name: tuple(edges.get(name, ())) for name in operators}
    return tuple(
        Launch(s.node, (Operator(s.node, "deep", "linear + relu → 128"),), s.stream, s.level, before[s.node])
        for s in policy(before, streams).steps
    )


def random_plan(seed, streams):
    """Up to 70 operators, each reading one to three of those before it, most often of the last few."""
    rng = np.random.default_rng(seed)
    names = [f"{'scaled_dot_product_attention.' if i % 7 == 3 else 'linear_'}{i}" for i in range(int(rng.integers(2, 70)))]
    near = int(rng.choice([2, 5, 70]))
    edges = {
        name: {names[int(j)] for j in rng.integers(max(0, i - near), i, int(rng.integers(1, 4)))}
        for i, name in enumerate(names)
        if i
    }
    return plan_of({name: sorted(sources) for name, sources in edges.items()}, names, streams)


def side_by_side(count):
    """Everything at once, then all of it joined."""
    names = [f"table.{i}" for i in range(count)]
    return plan_of(dict.fromkeys(names, ("lookup",)) | {"cat": names}, ["lookup", *names, "cat"])


def chain(count):
    names = [f"layer_{i}" for i in range(count)]
    return plan_of({b: (a,) for a, b in pairwise(names)}, names)


def of_model(name, waves):
    architecture, options = CASES[name]
    graph = fuse(build_graph(architecture, model_oracle.make_schema(**options), 1))
    grouped = group_waves(graph) if waves else graph
    return launches(grouped, POLICIES["sequential" if waves else "breadth_first"](grouped, 4))


PLANS = (
    {f"random-{seed}-{streams}": random_plan(seed, streams) for seed in range(12) for streams in (1, 2, 4, 7)}
    | {f"{name}{'-waves' * waves}": of_model(name, waves) for name in CASES for waves in (False, True)}
    | {f"side-by-side-{n}": side_by_side(n) for n in (1, 9, 40)}
    | {f"chain-{n}": chain(n) for n in (1, 2, 18, 47, 120)}
)


layout_of = cache(plan_layout)  # six tests ask for each plan's


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]


def overlap(a, b):
    return min(a.x + a.width, b.x + b.width) - max(a.x, b.x) > 0 and min(a.y + a.height, b.y + b.height) - max(a.y, b.y) > 0


def launch_boxes(layout):
    framed = {frame.launch for frame in layout.frames}
    return [*layout.frames, *(box for box in layout.boxes if box.launch not in framed)]


def segments(arrow):
    return list(pairwise(arrow.points))


def touches(segment, box, inside=1.0):
    """Runs through the box, not only along or up to its edge."""
    (x0, y0), (x1, y1) = segment
    return (
        max(x0, x1) > box.x + inside
        and min(x0, x1) < box.x + box.width - inside
        and max(y0, y1) > box.y + inside
        and min(y0, y1) < box.y + box.height - inside
    )


def test_every_operator_has_a_box_of_its_own_on_the_page(plan):
    layout = layout_of(plan)
    assert sorted("".join(b.name) for b in layout.boxes) == sorted(o.name for launch in plan for o in launch.operators)
    for a, b in combinations(layout.boxes, 2):
        assert not overlap(a, b), (a, b)
    for a, b in combinations(launch_boxes(layout), 2):
        assert not overlap(a, b), (a, b)
    for box in launch_boxes(layout):
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= layout.width
        assert box.y + box.height <= layout.height


def test_every_label_fits_its_box(plan):
    for box in layout_of(plan).boxes:
        assert all(text_width(line, NAME, bold=True) <= box.width - 8 for line in box.name)
        assert all(text_width(line, DETAIL) <= box.width - 8 for line in box.detail)
        assert NAME * len(box.name) + DETAIL * len(box.detail) <= box.height - 8


def test_arrows_cross_neither_boxes_nor_labels(plan):
    layout = layout_of(plan)
    for arrow in layout.arrows:
        for segment in segments(arrow):
            assert segment[0][0] == segment[1][0] or segment[0][1] == segment[1][1], "neither level nor upright"
            assert not [box.launch for box in launch_boxes(layout) if touches(segment, box)]
            for label in layout.labels:
                half = text_width(label.text, DETAIL) / 2
                box = type(layout.lanes[0])(label.x - half, label.y - DETAIL / 2, 2 * half, DETAIL)
                assert not touches(segment, box, inside=0), (arrow, label)


def test_every_arrow_goes_from_the_launch_that_makes_to_the_one_that_reads(plan):
    layout = layout_of(plan)
    boxes = {box.launch: box for box in launch_boxes(layout)}
    stream = {launch.name: launch.stream for launch in plan}
    assert [(a.source, a.target) for a in layout.arrows] == [(s, launch.name) for launch in plan for s in launch.reads]
    for arrow in layout.arrows:
        (x0, y0), (x1, y1) = arrow.points[0], arrow.points[-1]
        source, target = boxes[arrow.source], boxes[arrow.target]
        assert (x0, y0) == pytest.approx((source.x + source.width / 2, source.y + source.height))
        assert y1 == pytest.approx(target.y)
        assert target.x < x1 < target.x + target.width
        assert arrow.points[-2][0] == x1, "comes from the side"
        assert y1 - arrow.points[-2][1] >= 9, "leaves no room for its head"
        assert arrow.crosses == (stream[arrow.source] != stream[arrow.target])


def test_arrows_from_different_launches_cross_but_never_run_on_one_another(plan):
    lines = [(a.source, s) for a in layout_of(plan).arrows for s in segments(a)]
    for across in (0, 1):
        along = 1 - across
        straight = [(source, s) for source, s in lines if s[0][across] == s[1][across]]
        for (a, s), (b, t) in combinations(sorted(straight, key=lambda line: line[1][0][across]), 2):
            if a == b or abs(s[0][across] - t[0][across]) > 0.5:
                continue
            shared = min(max(p[along] for p in s), max(p[along] for p in t)) - max(
                min(p[along] for p in s), min(p[along] for p in t)
            )
            assert shared <= 0.01, (a, s, b, t)


def test_the_page_is_no_wider_than_a_screen(plan):
    layout = layout_of(plan)
    assert layout.width <= MOST_WIDTH
    assert max(x for a in layout.arrows for x, _ in a.points) <= layout.width if layout.arrows else True
    sections = [("one", layout), ("another", layout)]
    assert all(x + s[1].width <= MOST_WIDTH + 60 for s, (x, _) in zip(sections, section_places(sections), strict=True))


def test_a_long_plan_goes_on_in_bands_beside_the_first():
    assert (plan_layout(chain(12)).height, len(plan_layout(chain(12)).lanes)) == (pytest.approx(754, abs=120), 1)
    long = plan_layout(chain(47))
    assert len(long.lanes) == 4
    assert long.height < 1000
    assert [label.text for label in long.labels if label.text.isdigit()] == [str(i) for i in range(47)]


def test_what_a_stream_runs_in_one_level_lies_from_left_to_right_in_its_lane():
    plan = [
        Launch(n, (Operator(n, "deep", "linear"),), 0, level, ())
        for n, level in (("a", 0), ("b", 1), ("c", 1), ("d", 1), ("e", 2))
    ]
    layout = plan_layout(plan)
    at = {box.launch: box for box in layout.boxes}
    assert at["b"].y == at["c"].y == at["d"].y
    assert at["a"].x == at["b"].x == at["e"].x < at["c"].x < at["d"].x
    [lane] = layout.lanes
    assert lane.x < at["a"].x
    assert lane.x + lane.width > at["d"].x + at["d"].width


@pytest.mark.parametrize("name", ["dcnv2-both", "dlrm", "dlrm-dcnv2"])
def test_a_wave_is_one_frame_around_its_operators_and_the_head_behind_them(name):
    layout = plan_layout(of_model(name, waves=True))
    assert layout.frames
    for frame in layout.frames:
        members = [box for box in layout.boxes if box.launch == frame.launch]
        assert len(members) > 1
        assert frame.name == (f"{frame.launch}: one launch",)
        for box in members:
            assert frame.x < box.x < box.x + box.width < frame.x + frame.width
            assert frame.y + 15 < box.y < box.y + box.height < frame.y + frame.height
        for head in (box for box in members if box.module == "head"):
            assert all(head.y >= box.y + box.height for box in members if box is not head)


def test_waves_are_drawn_where_one_holds_several_operators():
    graph = fuse(build_graph(CASES["dlrm"][0], model_oracle.make_schema(**CASES["dlrm"][1]), 1))
    assert [title.split(" ")[0] for title, _ in plan_sections(graph)] == ["breadth_first", "waves,"]
    graph = fuse(build_graph(CASES["dlrm-itself"][0], model_oracle.make_schema(**CASES["dlrm-itself"][1]), 1))
    several = any(len(n.attrs.members) > 1 for n in group_waves(graph).nodes)
    assert len(plan_sections(graph)) == 1 + several


def test_an_operator_says_what_it_computes_and_how_wide_its_values_are():
    plan = of_model("dlrm-dcnv2", waves=False)
    details = {o.name: o.detail for launch in plan for o in launch.operators}
    assert details["bottom.0"] == "linear + relu → 12"
    assert details["head"] == "→ 1"
    assert details["lookup"].endswith("features → 32, 4")
    assert levels({launch.name: launch.reads for launch in plan}) == {launch.name: launch.level for launch in plan}
