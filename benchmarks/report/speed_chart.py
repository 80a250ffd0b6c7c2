"""The README's picture: how many times as fast as the strongest peer a call is, by model, candidates and precision."""

import json
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from benchmarks.report.panels import SHADES
from benchmarks.report.results import Results, mean
from benchmarks.systems.names import MODEL_TITLES, PAPER_MODELS

PRECISIONS = ("tf32", "bf16")
_INK, _PALE = "#2B2D42", "#8D99AE"
Speeds = dict[str, dict[str, dict[str, float]]]  # precision -> model -> candidates -> times as fast


def speeds(results: Results) -> Speeds:
    """What the picture shows, rounded as it says it."""
    found: Speeds = {}
    for precision in PRECISIONS:
        for g in (g for g in results.gains(precision=precision) if g.model in PAPER_MODELS):
            of_model = found.setdefault(precision, {}).setdefault(MODEL_TITLES[g.model], {})
            of_model[str(g.batch)] = round(g.over_peer, 2)
    return found


def draw(results: Results, path: Path) -> None:
    """Writes the PNG, with its numbers as the image's description. Nothing, where nothing was measured."""
    shown = speeds(results)
    if not shown:
        return
    figure = Figure(figsize=(8, 5.2), layout=ConstrainedLayoutEngine(hspace=0.08), facecolor="white")
    figure.suptitle("One call on an H200: times as fast as the strongest peer", x=0.028, ha="left", fontsize=13, color=_INK)
    top = max(v for models in shown.values() for sizes in models.values() for v in sizes.values())
    for row, (precision, models) in enumerate(shown.items(), 1):
        axes = figure.add_subplot(len(shown), 1, row)
        average = mean(v for sizes in models.values() for v in sizes.values())
        axes.set_title(f"{precision}: {average:.2f}x in geometric mean", loc="left", fontsize=10.5, color=_INK)
        for i, sizes in enumerate(models.values()):
            for j, (candidates, gain) in enumerate(sizes.items()):
                at = i * (len(sizes) + 1) + j
                label = f"{candidates}" if (row, i) == (1, 0) else None
                axes.bar(at, gain, 0.9, color=SHADES[j % len(SHADES)], label=label)
                axes.text(at, gain + 0.04, f"{gain:.2f}", ha="center", va="bottom", fontsize=8, color=_INK)
        centre = (len(sizes) - 1) / 2
        axes.set_xticks([i * (len(sizes) + 1) + centre for i in range(len(models))], list(models), fontsize=10, color=_INK)
        axes.axhline(1.0, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.text(len(models) * (len(sizes) + 1) - 1.3, 1.0, "peer", fontsize=8.5, color=_INK, va="center", ha="left")
        axes.set_xlim(-0.7, len(models) * (len(sizes) + 1) - 1.4)
        axes.set_ylim(0, top * 1.1)
        axes.set_yticks([0, 1, 2], ["0", "1x", "2x"], fontsize=8.5, color=_PALE)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.legend(title="candidates a call", ncols=5, loc="outside lower center", frameon=False, fontsize=9, title_fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, metadata={"Software": None, "Description": json.dumps(shown)})


def drawn(path: Path) -> Speeds:
    """The numbers that a PNG of `draw` shows."""
    with Image.open(path) as image:
        found: Speeds = json.loads(image.info["Description"])
    return found
