"""A request's timeline as plain data: rows that leave each other's names alone, and the colours that the plan's picture has."""

from itertools import pairwise

import pytest

from dpiframe_core.describe.bar_labels import SIZE, SLOPE
from dpiframe_core.describe.label_text import text_width
from dpiframe_core.describe.module_colors import module_colors
from dpiframe_core.describe.plan_plot import plot_plan
from dpiframe_core.describe.timeline_layout import WIDTH, tick_times, timeline_layout
from dpiframe_core.describe.timeline_plot import draw_timeline
from dpiframe_core.describe.trace import Span, Trace
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.architecture import DCNv2
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.model_graph import model_graph
from tests.runner import small_bundle


def gpu_trace(kernels=40):
    """Kernels of half a microsecond to three on two streams, one behind the other, and the host above them."""
    spans = [Span("captured", "host", "launch", 0, 8), Span("captured", "host", "wait", 8, 100)]
    for stream in (0, 1):
        at = 9.0
        for i in range(kernels):
            length = 0.5 + 2.5 * ((i * 7 + stream) % 11) / 10
            module = ("deep", "self_attention", "deep+fm")[i % 3]
            spans.append(Span("captured", f"stream {stream}", f"layer_norm_{i}", at, at + length, {"module": module}))
            at += length + 0.1
    return Trace({}, tuple(spans))


def test_names_of_a_row_stay_between_it_and_the_row_above():
    layout = timeline_layout(gpu_trace())
    tops = sorted({bar.y for bar in layout.bars})
    high = {bar.y: bar.height for bar in layout.bars}
    above = [t for t in layout.texts if t.place == "above"]
    assert above
    for text in above:
        before = max((y + high[y] for y in tops if y < text.y), default=0.0)
        assert text.y - text_width(text.text, SIZE) * SLOPE - SIZE / 2 >= before
        assert text.x + text_width(text.text, SIZE) * SLOPE <= WIDTH
    for a, b in pairwise(tops):
        assert a + high[a] < b


def test_every_bar_is_named_or_counted():
    trace = gpu_trace(kernels=90)
    layout = timeline_layout(trace)
    named = sum(t.place in ("in", "beside", "above") for t in layout.texts)
    counted = [int(t.text.split(" ")[0]) for t in layout.texts if t.text.endswith("without name")]
    assert counted
    assert named + sum(counted) == len(trace.spans) == len(layout.bars)


def test_ticks_are_round_times_and_few():
    assert tick_times(25.3) == [0, 5, 10, 15, 20, 25]
    assert tick_times(0.9) == pytest.approx([i / 10 for i in range(10)])
    for whole in (0.05, 1, 3.7, 99, 1234.5, 4e6):
        assert 4 <= len(tick_times(whole)) <= 12
        assert tick_times(whole)[-1] <= whole


def test_a_timeline_of_waves_has_the_colours_of_the_plan(tmp_path):
    bundle = small_bundle(tmp_path / "b", DCNv2(cross_layers=2, hidden_units=(16, 8), structure="parallel"))
    graph = fuse(model_graph(bundle))
    waves = group_waves(graph)
    assert any("+" in n.module for n in waves.nodes)
    assert module_colors(n.module for n in waves.nodes) == module_colors(n.module for n in graph.nodes)


def test_both_pictures_are_drawn_with_every_name(tmp_path):
    bundle = small_bundle(tmp_path / "b", DCNv2(cross_layers=2, hidden_units=(16, 8), structure="parallel"))
    plot_plan(bundle, tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert all(f"<!-- {n.name} -->" in drawn for n in fuse(model_graph(bundle)).nodes)
    assert all(f"<!-- stream {i} -->" in drawn for i in (0, 1))
    plot_plan(bundle, tmp_path / "plan.png")
    size = (tmp_path / "plan.png").read_bytes()[16:20]
    assert 300 < int.from_bytes(size, "big") <= 1600
    trace = gpu_trace(6)
    draw_timeline("t", timeline_layout(trace), module_colors(s.module for s in trace.spans)).save(tmp_path / "time.svg")
    drawn = (tmp_path / "time.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("launch", "layer_norm_5", "stream 1", "self_attention", "fm"))
