"""Lookups over tables of which a GPU's memory holds a share: a row a law of ids, pooling and batch, the shares side by side."""

from benchmarks.report.markdown import table, us
from benchmarks.report.results import Results


def tiers(results: Results) -> list[str]:
    """Microseconds of a call, p50. Nothing where nothing was measured."""
    found = results.of("tiers")
    if not found:
        return []
    times = {(r["system"], r["cell"]["share"], *_key(r)): r["p50_us"] for r in found}
    shares = sorted({r["cell"]["share"] for r in found if r["system"] == "one-sided"}, reverse=True)
    of_files = sorted({r["cell"]["share"] for r in found if r["system"] == "files"})[:1]
    columns = [("replicated", 1.0), *(("one-sided", share) for share in shares), ("host", 0.0), ("cpu-gather", 0.0),
               *(("files", share) for share in of_files)]  # fmt: skip
    head = ["tables", "Zipf", "ids a bag", "rows", "all in HBM", *(f"{share:.4g} in HBM" for share in shares), "none in HBM",
            "gathered by the CPU", *(f"{share:.4g} in HBM, 0.5 in files" for share in of_files)]  # fmt: skip
    rows = []
    for key in dict.fromkeys(_key(r) for r in found):
        cells = [times.get((system, share, *key)) for system, share in columns]
        count, of_rows, dim, zipf, pooling, batch = key
        rows.append(
            [f"{count} x {of_rows:,} x {dim}", zipf, pooling, f"{batch:,}", *("" if c is None else us(c) for c in cells)]
        )
    return table(head, rows, figures=4)


def _key(r: dict) -> tuple:
    c = r["cell"]
    return c["tables"], c["rows"], c["dim"], c["zipf"], c["pooling"], r["batch"]
