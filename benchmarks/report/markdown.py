"""Figures and tables as Markdown, and pages whose generated parts stand between two comments."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.report.results import mean

_PART = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], figures: int = 1) -> list[str]:
    """A table, nothing if it has no rows; columns from number `figures` on are aligned to the right."""
    rows = list(rows)
    if not rows:
        return []
    line = "|" + "".join("---|" if i < figures else "---:|" for i in range(len(head)))
    return [f"| {' | '.join(map(str, head))} |", line, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def times_over(gains: Sequence[float]) -> str:
    """How many times as fast, over several cells: the geometric mean, the least and the most."""
    return f"{mean(gains):.2f}x ({min(gains):.2f}x to {max(gains):.2f}x)"


def failures(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {status}" for status, count in failed.items())


def parts_of(page: str) -> dict[str, str]:
    """The generated parts of a page by name, as they stand there."""
    return {part["name"]: part["text"] for part in _PART.finditer(page)}


def filled(where: str, page: str, parts: Mapping[str, Sequence[str]]) -> str:
    """The page with its generated parts written anew. `where` names it in errors."""

    def part(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in parts:
            raise ValueError(f"{where}: got a generated part {name!r}, expected one of {', '.join(parts)}")
        return "\n".join([f"<!-- generated: {name} -->", "", *parts[name], "", "<!-- end -->"])

    return _PART.sub(part, page)
