"""Lookups over tables in memories of several kinds: one GPU's and the host's; several GPUs' shares, beside collectives and
by three placements; tables as large as they were; the links. And rows of files, while traffic changes.
"""

from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure

from benchmarks.records.record import Record
from benchmarks.report import panels
from benchmarks.report.markdown import table, us
from benchmarks.report.results import Results

LINKS = {"local": "its own memory", "peer": "another GPU's", "host": "the host's"}
PLACED = ("replicated", "partitioned", "one-sided")
_PLACED_ROWS = 1024  # of a call, in the picture of placements
_SHARED = {"one-sided": "read where they lie", "nccl": "by NCCL"}
_PLACED = {"replicated": "hot rows on each GPU", "partitioned": "no row twice", "one-sided": "as planned"}


def tiers(results: Results) -> list[str]:
    """Microseconds of a call, p50. Nothing where nothing was measured."""
    found = [r for r in results.of("tiers") if "share" in r["cell"]]
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


def by_collectives(
    results: Results, gpus: int | None = None, peer: str = "nccl"
) -> dict[tuple[int, int, int, int, int], dict[str, Record]]:
    """(GPUs, dim, tables, ids a bag, rows) -> records by system. gpus: None: of all numbers above one."""
    found: dict[tuple[int, int, int, int, int], dict[str, Record]] = {}
    for r in results.of("tiers"):
        c = r["cell"]
        if "ids" in c and r["p50_us"] and (c["gpus"] > 1 if gpus is None else c["gpus"] == gpus):
            found.setdefault((c["gpus"], c["dim"], c["tables"], c["pooling"], r["batch"]), {})[r["system"]] = r
    return {key: cell for key, cell in sorted(found.items()) if {"one-sided", peer} <= cell.keys()}


def by_placement(results: Results) -> dict[tuple[float, float, int], dict[str, Record]]:
    """(size over one GPU's memory, Zipf's exponent, rows) -> records by system."""
    found: dict[tuple[float, float, int], dict[str, Record]] = {}
    for r in results.of("tiers"):
        c = r["cell"]
        if "times_hbm" in c:
            found.setdefault((c["times_hbm"], c["zipf"], r["batch"]), {})[r["system"]] = r
    return {key: cell for key, cell in sorted(found.items()) if set(PLACED) <= cell.keys()}


def over_nccl(cell: Mapping[str, Record]) -> float:
    return _over(cell, "nccl")


def _over(cell: Mapping[str, Record], peer: str) -> float:
    return float(cell[peer]["p50_us"] / cell["one-sided"]["p50_us"])


def over_simple(cell: Mapping[str, Record]) -> float:
    """How many times as fast as the better of the two simple placements."""
    return min(float(cell[s]["p50_us"]) for s in PLACED[:2]) / float(cell["one-sided"]["p50_us"])


def collectives(results: Results, peer: str = "nccl", name: str = "NCCL") -> list[str]:
    """Microseconds of a call, ours and another's, and how many times as fast ours is. A row a table set and pooling."""
    cells = by_collectives(results, peer=peer)
    batches = sorted({batch for *_, batch in cells})
    head = ["GPUs", "dim", "tables", "ids a bag"]
    head += [each for b in batches for each in (f"{b:,} rows, ours", name, "times")]
    rows = []
    for key in dict.fromkeys(key[:-1] for key in cells):
        of = [cells.get((*key, b)) for b in batches]
        shown = [[us(c["one-sided"]["p50_us"]), us(c[peer]["p50_us"]), f"{_over(c, peer):.2f}x"] if c else [""] * 3 for c in of]
        rows.append([*key, *(text for each in shown for text in each)])
    failed = (r for r in results.of("tiers") if r["system"] == peer and r.get("error"))
    why = dict.fromkeys(f"{r['system']}: not measured, {r['error']}" for r in failed)
    return [*table(head, rows, figures=4), *([""] if rows and why else []), *why]


def alone(results: Results) -> list[str]:
    """The same tables on one GPU: our lookup beside the kernel that the collectives use."""
    rows = [
        [dim, tables, pooling, f"{batch:,}", us(c["one-sided"]["p50_us"]), us(c["nccl"]["p50_us"]), f"{over_nccl(c):.2f}x"]
        for (_, dim, tables, pooling, batch), c in by_collectives(results, gpus=1).items()
    ]
    return table(["dim", "tables", "ids a bag", "rows", "ours", "one gather and sum in Triton", "times"], rows, figures=4)


def placements(results: Results) -> list[str]:
    """Microseconds of a call by placement, and the plan's reads of each tier."""
    rows = []
    for (size, zipf, batch), cell in by_placement(results).items():
        times = [us(cell[s]["p50_us"]) for s in PLACED]
        reads = cell["one-sided"]["reads"]
        told = [f"{reads[t]:.1%}" for t in ("hot", "warm", "cold")]
        rows.append([f"{size:g}", zipf, f"{batch:,}", *times, f"{over_simple(cell):.2f}x", *told])
    head = ["tables over one GPU's memory", "Zipf", "rows", "replicated", "partitioned", "the plan", "over the better",
            "its reads hot", "warm", "cold"]  # fmt: skip
    return table(head, rows, figures=3)


def links(results: Results) -> list[str]:
    """Random rows of each memory, all GPUs reading at once."""
    found = {(r["system"], r["cell"]["spread_mib"], r["cell"]["row_bytes"]): r for r in results.of("links")}
    spreads, sizes = (sorted({key[i] for key in found}) for i in (1, 2))
    rows = []
    for link, name in LINKS.items():
        for spread in spreads:
            of = [found.get((link, spread, size)) for size in sizes]
            if any(of):
                each = (f"{r['gb_per_s']:.0f} GB/s, {r['ns_a_row']:.2f} ns" if r else "" for r in of)
                rows.append([name, f"{spread:,g} MiB", *each])
    return table(["read from", "spread over", *(f"rows of {size} bytes" for size in sizes)], rows)


def large(results: Results) -> list[str]:
    rows = []
    for r in results.of("tiers-large"):
        files, rows_a_call = (
            r["cell"].get("files_mib", 0),
            f"{r['batch']:,}" + (", read first" if r["system"] == "files" else ""),
        )
        tiers = ", ".join(f"{r[t]:.1%} {t}" for t in ("hot", "warm", "cold", *(("files",) if files else ())))
        where = f"{r['device_bytes'] / 1e9:.0f} GB on each GPU, {r['host_bytes'] / 1e9:.0f} GB in host memory"
        where += f", {files * 2**20 / 1e9:.0f} GB in files" if files else ""
        times = [us(r["p50_us"]), us(r["p99_us"]), f"{r['rows_per_s'] * r['cell']['gpus'] / 1e6:.1f}"]
        rows.append([f"{r['table_bytes'] / 1e9:.0f} GB", f"{r['all_rows'] / 1e6:.0f} M", where, tiers, rows_a_call, *times])
    head = ["tables", "rows of them", "lie in", "reads", "rows a call", "p50 us", "p99 us", "M rows/s, all GPUs"]
    return table(head, rows, figures=4)


def loading(results: Results) -> list[str]:
    rows = []
    for r in results.of("tiers-load"):
        spent = r["stages_s"]
        steps = [f"{spent[s]:.1f}" if s in spent else "" for s in ("memory", "copied", "awaited", "locked", "share")]
        disk = f"{r['disk_gb_per_s']:.1f}" if r["disk_gb_per_s"] else "page cache"
        rows.append([f"{r['table_bytes'] / 1e9:.0f} GB", disk, f"{r['ready_s']:.1f}", f"{r['gb_per_s']:.2f}", *steps])
    head = ["tables", "files read alone, GB/s", "ready after, s", "GB/s", "memory had", "rows copied", "others awaited",
            "memory locked", "share filled"]  # fmt: skip
    return table(head, rows)


PARTS = {"planned": "as planned", "changed": "just changed", "later": "changed, later"}


def promotion(results: Results) -> list[str]:
    """Beside each other what both systems read in files, and how long their requests took."""
    found: dict[tuple, dict[str, Record]] = {}
    for r in results.of("tiers-promotion"):
        c = r["cell"]
        found.setdefault((c["zipf"], c["disk_us"], c["part"]), {})[r["system"]] = r
    rows = []
    for (zipf, disk_us, part), of in sorted(found.items(), key=lambda f: (*f[0][:2], list(PARTS).index(f[0][2]))):
        if {"slots", "promoted"} <= of.keys():
            both = of["slots"], of["promoted"]
            each = [f"{r['p99_file_rows']:.0f}" for r in both]
            each += [f"{r[which] / 1e3:.1f}" for which in ("p50_us", "p99_us") for r in both]
            disk = f"{disk_us:g} us a row" if disk_us else "page cache"
            rows.append([zipf, disk, PARTS[part], *(f"{r['file_share']:.1%}" for r in both), *each])
    head = ["Zipf", "files", "traffic", "read in files, slots", "promoted", "p99 rows of a request, slots", "promoted",
            "p50 ms, slots", "promoted", "p99 ms, slots", "promoted"]  # fmt: skip
    return table(head, rows, figures=3)


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """Of tables that several GPUs hold together."""
    yield from _shared(results)
    yield from _placements(results)


def _shared(results: Results) -> Iterator[tuple[str, Figure]]:
    cells = by_collectives(results)
    if not cells:
        return
    dims, poolings = (sorted({key[i] for key in cells}) for i in (1, 3))
    sizes = sorted({key[2] for key in cells})
    most = sizes[-2] if len(sizes) > 1 else sizes[0]
    gpus = {2: "two", 4: "four"}.get(count := max(key[0] for key in cells), count)
    title = f"A lookup of {most} tables whose rows {gpus} GPUs share (median of a call, microseconds)"
    figure, axes = panels.grid(title, len(poolings), rows=len(dims))
    for a, (dim, pooling) in zip(axes, ((d, p) for d in dims for p in poolings), strict=True):
        own = {key[4]: cell for key, cell in cells.items() if key[1:4] == (dim, most, pooling)}
        panels.lines(a, {name: {b: c[s]["p50_us"] for b, c in own.items()} for s, name in _SHARED.items()}, "rows")
        a.set_title(f"dim {dim}, {pooling} ids a bag", fontsize=9)
    panels.same_heights(axes)
    panels.legend(figure, axes)
    yield "tiers-nccl", figure


def _placements(results: Results) -> Iterator[tuple[str, Figure]]:
    cells = {(size, zipf): c for (size, zipf, batch), c in by_placement(results).items() if batch == _PLACED_ROWS}
    if not cells:
        return
    laws = sorted({zipf for _, zipf in cells})
    title = f"A lookup of {_PLACED_ROWS:,} rows by placement (median of a call, microseconds)"
    figure, axes = panels.grid(title, len(laws))
    for a, zipf in zip(axes, laws, strict=True):
        own = {size: c for (size, law), c in cells.items() if law == zipf}
        panels.lines(
            a,
            {name: {n: c[s]["p50_us"] for n, c in own.items()} for s, name in _PLACED.items()},
            "tables over one GPU's memory",
        )
        a.set_title(f"Zipf {zipf:g}", fontsize=9)
    panels.same_heights(axes)
    panels.legend(figure, axes)
    yield "tiers-placements", figure
