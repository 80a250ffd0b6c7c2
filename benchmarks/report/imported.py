"""Models by the names that their libraries give them: how each is imported, what it runs as on a GPU, how long a call takes."""

from collections.abc import Mapping

from benchmarks.records.record import Record
from benchmarks.report.markdown import table, us
from benchmarks.report.results import Results
from dpiframe_core.importers.fuxictr.run import IMPORTED
from dpiframe_core.importers.recbole.models import MODELS as RECBOLE
from dpiframe_core.importers.recbole.sequential import SEQUENTIAL

BATCHES = (256, 1024)
PATHS = {
    "waves": "waves", "tower": "waves", "breadth_first": "streams", "regions": "Inductor", "sequential": "one stream",
    "loose regions": "Inductor", "shares": "shares",
}  # fmt: skip
# Suite `latency` has these, of the same sizes.
_MEASURED_AS = {
    "DeepFM": "deepfm", "WideDeep": "wide_deep", "xDeepFM": "xdeepfm", "DCN": "dcn", "DCNv2": "dcnv2", "DIN": "din-50",
    "DLRM": "dlrm",
}  # fmt: skip
_SAME = {"SharedBottom": "ShareBottom"}  # one model under two names
_OTHERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "DeepCTR-Torch": (
        ("WDL", "WideDeep"), ("DeepFM", "DeepFM"), ("xDeepFM", "xDeepFM"), ("DCN", "DCN"),
        ("DCNMix", "DeepCTR-Torch.DCNMix"), ("DIN", "DIN"),
    ),
    "torch-rechub": (("WideDeep", "WideDeep"), ("DeepFM", "DeepFM"), ("DCN", "DCN"), ("DCNv2", "DCNv2")),
    "RecBole": tuple((name, f"RecBole.{name}") for name in sorted((*RECBOLE, *SEQUENTIAL), key=str.lower)),
    "TorchRec": (("DLRM", "DLRM"), ("DLRM_DCN", "TorchRec.DLRM_DCN")),
    "DLRM": (("DLRM_Net", "DLRM"),),
}  # fmt: skip


def imported(results: Mapping[str, Results]) -> list[str]:
    """The page's table, at tf32, or fp32 where that is too far off: a row a library and model. Cells nobody measured are empty.

    results: by the name of the GPU; a model is told of the first that has it.
    """
    found: dict[tuple[str, int], tuple[str, Record]] = {}
    for gpu, measured_there in results.items():
        for precision in ("tf32", "fp32"):
            for r in measured_there.of("imported", precision=precision):
                found.setdefault((r["model"], r["batch"]), (gpu, r))
        for cell in measured_there.usual("latency", "dpiframe", precision="tf32"):
            r = cell["dpiframe"]
            for name in (n for n, m in _MEASURED_AS.items() if m == r["model"] and r["cell"].get("contexts", 1) == 1):
                found.setdefault((name, r["batch"]), (gpu, r))
    rows = [_row("FuxiCTR", name, _SAME.get(name, name), found) for name in IMPORTED]
    rows += [_row(library, name, like, found) for library, names in _OTHERS.items() for name, like in names]
    head = [
        "library",
        "model",
        "imported from",
        "GPU",
        *(f"path, {b:,} rows" for b in BATCHES),
        *(f"us, {b:,} rows" for b in BATCHES),
    ]
    return table(head, rows, figures=6)


def measured(results: Results) -> list[str]:
    """RESULTS.md's: every record, with what else the warm-up timed and how far the scores are off."""
    rows = []
    for r in results.of("imported"):
        times = [f"{us(r['p50_us'])} ({us(r['p99_us'])})", us(r["device_us"]), f"{r['max_abs_err']:.0e}"]
        others = ", ".join(f"{PATHS.get(name, name)} {us(value)}" for name, value in (r.get("programs_us") or {}).items())
        made = [r["launches"] or "", f"{r['import_s']:.0f}", f"{r['warmup_s']:.1f}"]
        rows.append([r["model"], r["precision"], r["batch"], PATHS.get(r["program"], ""), *times, *made, others])
    head = [
        "model",
        "",
        "rows",
        "path",
        "us, p50 (p99)",
        "device",
        "max \\|dp\\|",
        "launches",
        "import, s",
        "warm-up, s",
        "programs, us",
    ]
    return table(head, rows, figures=2)


def _row(library: str, name: str, like: str, found: Mapping[tuple[str, int], tuple[str, Record]]) -> list[str]:
    cells = [found.get((like, b), ("", None)) for b in BATCHES]
    gpus = ", ".join(sorted({gpu for gpu, r in cells if r}))
    paths = [_path(r) if r else "" for _, r in cells]
    given = "run, by name" if library == "FuxiCTR" else "checkpoint and spec, by name"
    return [library, name, given, gpus, *paths, *(us(r["p50_us"]) if r else "" for _, r in cells)]


def _path(r: Record) -> str:
    path = PATHS.get(r.get("program") or "", "")
    return f"{path}, fp32" if r["precision"] == "fp32" else path
