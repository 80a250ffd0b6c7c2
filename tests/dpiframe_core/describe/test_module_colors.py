"""Colours and the width of text: what can be told apart, and what can be read."""

from itertools import combinations

import pytest

from dpiframe_core.describe import module_colors as palette
from dpiframe_core.describe.label_text import shortened, text_width, wrapped
from dpiframe_core.describe.module_colors import HOST, contrast, module_colors, text_color

ALL = [*palette._KNOWN.values(), *palette._OTHERS, HOST]
NAMES = (
    "lookup", "deep.0", "embedding", "scaled_dot_product_attention.2", "mask_blocks.0.hidden_layer.0", "linear + relu → 256",
    "39 features + 39 first-order", "Memcpy DtoH", "mmWWMM", "illi.l!|", "cross_v1_head, 3 layers",
)  # fmt: skip


def lab(color):
    """CIE L*a*b* of D65."""
    levels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels)
    x, y, z = 0.4124 * r + 0.3576 * g + 0.1805 * b, 0.2126 * r + 0.7152 * g + 0.0722 * b, 0.0193 * r + 0.1192 * g + 0.9505 * b
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x / 0.9505, y, z / 1.089))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_text_can_be_read_on_every_colour():
    assert min(contrast(text_color(color), color) for color in ALL) >= 4.5


def test_no_two_colours_are_alike():
    assert len(set(ALL)) == len(ALL)
    distance = [sum((p - q) ** 2 for p, q in zip(lab(a), lab(b), strict=True)) ** 0.5 for a, b in combinations(ALL, 2)]
    assert min(distance) >= 20  # one can tell 2.3 side by side


def test_a_module_has_one_colour_whatever_the_model():
    deepfm = module_colors(["embedding", "fm", "deep", "head"])
    dcn = module_colors(["head", "cross", "deep", "embedding", "deep"])
    assert {m: deepfm[m] for m in ("embedding", "deep", "head")} == {m: dcn[m] for m in ("embedding", "deep", "head")}
    assert module_colors(["mlp1"])["mlp1"] == module_colors(["mlp1", "deep", "head"])["mlp1"]


def test_modules_of_one_launch_have_the_colours_that_they_have_alone():
    assert module_colors(["embedding", "deep+fm", "deep+head"]) == module_colors(["fm", "head", "deep", "embedding"])
    assert module_colors(["", "deep"]).keys() == {"deep"}


def test_other_names_get_colours_of_their_own_in_any_order():
    names = [f"tower_{i}" for i in range(10)]
    colors = module_colors(names)
    assert len(set(colors.values())) == 10
    assert colors == module_colors(reversed(names))
    assert not set(colors.values()) & set(palette._KNOWN.values())
    assert len(module_colors([f"tower_{i}" for i in range(25)])) == 25


@pytest.mark.parametrize("bold", [False, True])
@pytest.mark.parametrize("text", NAMES)
def test_no_text_is_wider_than_its_estimate(text, bold):
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family="DejaVu Sans", size=40, weight="bold" if bold else "normal")
    drawn, _, _ = RendererAgg(100, 100, 72).get_text_width_height_descent(text, font, False)
    assert 0.97 * drawn <= text_width(text, 40, bold) <= 1.2 * drawn or "WW" in text


def test_long_text_is_broken_at_its_joints_and_what_is_left_loses_its_middle():
    assert wrapped("deep.0", 12, 100) == ("deep.0",)
    assert wrapped("mask_blocks.0.mask_layer.0", 12, 100) == ("mask_blocks.0.", "mask_layer.0")
    assert "".join(wrapped("scaled_dot_product_attention.2", 12, 110)) == "scaled_dot_product_attention.2"
    lines = wrapped(" ".join(["word"] * 40), 12, 100)
    assert len(lines) == 3
    assert "…" in lines[-1]
    short = shortened("a" * 50 + "17", 12, 100)
    assert text_width(short, 12) <= 100
    assert short.startswith("aaa")
    assert short.endswith("17")
