"""Each architecture over its best peers, and bf16 over our own tf32: the generated part `architectures`."""

from collections.abc import Sequence

from benchmarks.report.markdown import table
from benchmarks.report.results import Gain, Results, mean, model_name
from benchmarks.systems.names import BATCHES, MODEL_TITLES, architecture_of, cells_of

PRECISIONS = ("tf32", "bf16")
_LARGE = tuple(b for b in BATCHES if b >= 1024)


def architectures(results: Results) -> list[str]:
    """A row an architecture: in each precision the geometric mean over its cells, and the least with the cell that has it."""
    over = {p: [g for g in results.gains(precision=p) if g.batch in BATCHES and g.model in MODEL_TITLES] for p in PRECISIONS}
    own = bf16_over_tf32(results)
    rows = []
    for architecture in dict.fromkeys(map(architecture_of, MODEL_TITLES)):
        models = [m for m in MODEL_TITLES if architecture_of(m) == architecture]
        figures = [_figures([g for g in over[p] if g.model in models], sum(map(cells_of, models))) for p in PRECISIONS]
        gained = [v for (model, _), values in own.items() if model in models for v in values]
        if any(figures) or gained:
            of_own = f"{mean(gained):.2f}x (least {min(gained):.2f}x)" if gained else ""
            rows.append([MODEL_TITLES[models[0]].split(",")[0], *(f or "" for f in figures), of_own])
    head = ["", *(f"over the best peer, {p}" for p in PRECISIONS), "bf16 over our tf32, from 1,024 rows on"]
    return table(head, rows)


def bf16_over_tf32(results: Results) -> dict[tuple[str, int], list[float]]:
    """Our tf32 time over our bf16 time by model and rows, from 1,024 rows on; a value for each number of contexts."""
    times: dict[tuple[str, int, int], dict[str, float]] = {}
    for cell in results.usual("latency", "dpiframe"):
        r = cell["dpiframe"]
        if r["batch"] in _LARGE:
            times.setdefault((r["model"], r["batch"], r["cell"].get("contexts", 1)), {})[r["precision"]] = r["p50_us"]
    found: dict[tuple[str, int], list[float]] = {}
    for (model, batch, _), both in times.items():
        if set(PRECISIONS) <= both.keys():
            found.setdefault((model, batch), []).append(both["tf32"] / both["bf16"])
    return found


def _figures(found: Sequence[Gain], expected: int) -> str:
    if not found:
        return ""
    worst = min(found, key=lambda g: g.over_peer)
    measured = "" if len(found) == expected else f"; {len(found)} of {expected} cells"
    where = f"{model_name(worst.ours)} B={worst.batch}"
    return f"{mean(g.over_peer for g in found):.2f}x (least {worst.over_peer:.2f}x: {where}{measured})"
