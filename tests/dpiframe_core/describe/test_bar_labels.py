"""The names in a timeline: none on another, none cut off, at the density that a GPU's kernels have."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from dpiframe_core.describe.bar_labels import SIZE, SLOPE, SPACING, Bar, bar_labels, headroom
from dpiframe_core.describe.label_text import text_width

ROOM = 1390.0


def kernels(seed, count, shortest, longest, gap):
    """Bars from left to right with made-up lengths in pixels; as far as the room goes."""
    rng = np.random.default_rng(seed)
    bars, x = [], float(rng.uniform(0, 200))
    for i in range(count):
        end = x + float(rng.uniform(shortest, longest))
        if end > ROOM - 30:
            break
        bars.append(Bar(x, end, ["fm", "layer_norm_1", "deep.0", "mask_blocks.0.hidden_layer.0"][i % 4]))
        x = end + float(rng.uniform(0, gap))
    return bars


ROWS = [
    kernels(seed, *form)
    for seed in range(10)
    for form in ((6, 40, 300, 40), (40, 5, 40, 10), (90, 2, 20, 8), (400, 0.2, 3, 2), (400, 0.2, 3, 60))
]


@pytest.mark.parametrize("bars", ROWS)
def test_names_lie_on_no_other_name_and_on_no_bar_of_others(bars):
    labels = bar_labels(bars, ROOM)
    for label in labels:
        bar, width = bars[label.bar], text_width(bars[label.bar].text, SIZE)
        if label.place == "in":
            assert bar.left <= label.x - width / 2 <= label.x + width / 2 <= bar.right
        elif label.place == "beside":
            assert bar.right < label.x
            assert label.x + width <= min([b.left for b in bars if b.left >= bar.right], default=ROOM)
        else:
            assert label.x >= -1e-6
            assert label.x + width * SLOPE <= ROOM
    above = [label.x for label in labels if label.place == "above"]
    assert all(b - a >= SPACING - 1e-6 for a, b in pairwise(above)), "lines of text at a slant that touch"
    assert SPACING * SLOPE >= SIZE * 1.2


@pytest.mark.parametrize("bars", ROWS)
def test_only_the_shortest_go_without_a_name_and_only_where_the_row_is_full(bars):
    named = {label.bar for label in bar_labels(bars, ROOM)}
    missing = set(range(len(bars))) - named
    if missing:
        above = [n.bar for n in bar_labels(bars, ROOM) if n.place == "above"]
        assert len(above) >= (ROOM - 180) / SPACING - 1, "there was room for more"
        longest = max(bars[i].right - bars[i].left for i in missing)
        assert longest <= min(bars[i].right - bars[i].left for i in above)


def test_a_name_stands_in_its_bar_then_beside_it_then_above_it():
    bars = [Bar(0, 200, "lookup"), Bar(201, 211, "deep.0"), Bar(300, 310, "fm"), Bar(312, 320, "head"), Bar(321, 600, "deep.1")]
    assert [(n.place, n.x) for n in bar_labels(bars, 700)] == [
        ("in", 100), ("beside", 215),
        ("above", pytest.approx(310.5 - SPACING / 2)), ("above", pytest.approx(310.5 + SPACING / 2)), ("in", 460.5),
    ]  # fmt: skip


def test_names_too_close_move_equally_far_to_both_sides_and_keep_their_order():
    bars = [Bar(500 + i, 500.5 + i, "k") for i in range(5)]
    above = [n.x for n in bar_labels([*bars[:4], Bar(504, 504.5, "kernel")], ROOM) if n.place == "above"]
    assert above == sorted(above)
    assert np.mean(above) == pytest.approx(501.75, abs=1)


def test_names_at_the_end_of_the_row_move_left():
    bars = [Bar(1380 + i, 1380.5 + i, "hand over") for i in range(3)]
    labels = bar_labels(bars, ROOM)
    assert [n.place for n in labels] == ["above"] * 3
    assert labels[-1].x + text_width("hand over", SIZE) * SLOPE <= ROOM


def test_only_names_at_a_slant_take_room_above_the_row():
    bars = [Bar(0, 200, "lookup")]
    assert headroom(bars, bar_labels(bars, ROOM)) == 0
    bars = [Bar(0, 2, "lookup"), Bar(3, 200, "deep")]
    assert headroom(bars, bar_labels(bars, ROOM)) == pytest.approx(text_width("lookup", SIZE) * SLOPE + SIZE)


def test_leaders_do_not_cross():
    for bars in ROWS:
        above = [(bars[n.bar].middle, n.x) for n in bar_labels(bars, ROOM) if n.place == "above"]
        assert all((a[0] < b[0]) == (a[1] < b[1]) for a, b in combinations(above, 2))
