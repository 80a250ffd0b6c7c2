"""The colour of each module of a model, the same in every picture of it.

A module that our own models have keeps one colour in all of them. Any other name (of a compiled model) has its place among
further colours by its checksum, and takes the next that is free. So two pictures of a model agree, and two models too, but
where names clash. A launch of several modules (`deep+fm`) has the colours of all of them, side by side.
"""

from collections.abc import Iterable
from zlib import crc32

HOST = "#D5D9DF"  # what belongs to no module
_KNOWN = {
    "embedding": "#2F6DB5",
    "wide": "#E8C547",
    "fm": "#F28E2B",
    "cin": "#5FB7AE",
    "dot": "#7B5EA7",
    "cross": "#C23B8E",
    "attention": "#C8373C",
    "deep": "#2A7F50",
    "bottom": "#96613D",
    "parallel": "#9ACD4E",
    "model": "#98A6B8",
    "head": "#3D4451",
}
_OTHERS = (
    "#59C3F0", "#7A1F3D", "#F5A3BD", "#0B6E75", "#C9B1E4", "#7A6A00", "#FFC49B", "#4340C8", "#A9E2C3", "#D973E0",
)  # fmt: skip
_DARK, _LIGHT = "#16191D", "#FFFFFF"


def parts(module: str) -> tuple[str, ...]:
    """The modules that a launch serves: `deep+fm` is two."""
    return tuple(module.split("+")) if module else ()


def module_colors(modules: Iterable[str]) -> dict[str, str]:
    """Module -> "#RRGGBB", known modules first. They repeat only where a model has more than ten modules of its own naming."""
    names = {part for module in modules for part in parts(module)}
    colors = {name: color for name, color in _KNOWN.items() if name in names}
    free: list[str] = []
    for name in sorted(names - colors.keys()):
        free = free or list(_OTHERS)
        start = crc32(name.encode()) % len(_OTHERS)
        color = next(c for c in _OTHERS[start:] + _OTHERS[:start] if c in free)
        free.remove(color)
        colors[name] = color
    return colors


def text_color(fill: str) -> str:
    """Near black or white, whichever reads better on the colour."""
    return max((_LIGHT, _DARK), key=lambda text: contrast(fill, text))


def contrast(a: str, b: str) -> float:
    """The contrast ratio of WCAG 2, 1 to 21; text wants 4.5."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    levels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
