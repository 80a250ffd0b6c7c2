"""Figures that prose quotes, outside the generated tables, are those of the records that it names."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.records.run import RESULTS
from benchmarks.report.pages import ROOT
from benchmarks.report.results import Results

H200 = Results.read(RESULTS / "h200")


def one(suite: str, key: str, system: str = "dpiframe", **fixed: object) -> float:
    (value,) = {r[key] for r in H200.of(suite, system=system, **fixed)}
    return float(value)


DCNV2: dict[str, Any] = {"model": "dcnv2", "batch": 256, "precision": "tf32"}
LOOKUP: dict[str, Any] = {
    "batch": 1024, "dtype": "float32", "dim": 16, "fields": 26, "bag": 1, "ids": "zipf", "large": False,
}  # fmt: skip


def warm_ups(start: str) -> str:
    four = ("wide_deep", "deepfm", "dcn", "dcnv2")
    seconds = [r["seconds"] for r in H200.of("warmup", start=start) if r["model"] in four]
    return f"{min(seconds):.1f} to {max(seconds):.1f} s"


QUOTED: list[tuple[str, Callable[[], str]]] = [
    ("engine", lambda: f"The call takes {one('latency', 'p50_us', **DCNV2):.1f} us"),
    (
        "engine",
        lambda: (
            f"The device takes {one('latency', 'device_us', **DCNV2):.1f} of the {one('latency', 'p50_us', **DCNV2):.1f} us "
            f"(`latency-tf32.json`)"
        ),
    ),
    (
        "engine",
        lambda: (
            f"Waves take {one('ablation', 'p50_us', system='waves', **DCNV2):.1f} us here and streams "
            f"{one('ablation', 'p50_us', system='graph capture', **DCNV2):.1f}"
        ),
    ),
    (
        "engine",
        lambda: "scores {:.1f} M rows/s on one lane and {:.1f} M on two (`utilisation.json`)".format(
            *(one("utilisation", "rows_per_s", model="deepfm", batch=256, lanes=lanes) / 1e6 for lanes in (1, 2))
        ),
    ),
    ("engine", lambda: f"that call takes {one('embedding', 'p50_us', system='eager', **LOOKUP):.0f} us"),
    (
        "engine",
        lambda: (
            f"the call takes {one('embedding', 'p50_us', system='dpiframe-pinned', **LOOKUP):.1f} us, "
            f"{one('embedding', 'device_us', system='dpiframe-pinned', **LOOKUP):.1f} of them on the device"
        ),
    ),
    ("engine", lambda: f"a start of the four takes {warm_ups('cold')}, with them {warm_ups('again')}"),
    (
        "engine",
        lambda: (
            f"at fp8 gives {max(r['rows_per_s'] for r in H200.of('mlperf', precision='fp8', tables=None)) / 1e6:.1f} M pairs/s"
        ),
    ),
    (
        "engine-kernels",
        lambda: "one row takes {:.1f} us this way, {:.1f} of them on the device (`latency-tf32.json`)".format(
            *(one("latency", key, model="dcnv2", batch=1, precision="tf32") for key in ("p50_us", "device_us"))
        ),
    ),
]


@pytest.mark.parametrize(("page", "quoted"), QUOTED, ids=[f"{page}-{i}" for i, (page, _) in enumerate(QUOTED)])
def test_what_a_page_quotes_is_what_the_record_says(page: str, quoted: Callable[[], str]) -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs" / f"{page}.md").read_text())
    assert quoted() in text
