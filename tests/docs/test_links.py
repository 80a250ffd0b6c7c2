"""Every relative link of the README and the documents leads to a file, and to a heading where it names one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "k8s").glob("*.md")])
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*/RESULTS.md"))
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|<img[^>]*\ssrc=\"([^\"]+)\"|<a[^>]*\shref=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|/)")


def links(text: str) -> list[str]:
    """The relative targets of a page's links and pictures; what stands in code is none."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    targets = (next(filter(None, found)) for found in LINK.findall(prose))
    return [target for target in targets if not ELSEWHERE.match(target)]


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        repeated = 0
        while (name := anchor + (f"-{repeated}" if repeated else "")) in found:
            repeated += 1
        found.add(name)
    return found


def broken(page: Path, text: str) -> list[str]:
    """What is wrong with the relative links of a page at that place."""
    wrong = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or not file.is_relative_to(ROOT):
            wrong.append(f"{target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in headings(text if file == page else file.read_text()):
            wrong.append(f"{target}: no such heading")
    return wrong


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_links_and_headings_are_found_outside_code() -> None:
    assert links("[a](b.md#c) ![p](q.png) <img src=\"r.png\"> [w](https://x.y) `[n](o.md)`\n```text\n[n](o.md)\n```\n") == [
        "b.md#c", "q.png", "r.png",
    ]  # fmt: skip
    assert headings("# A b, c\n## `d`\n## [e](f)\n## `d`\n") == {"a-b-c", "d", "e", "d-1"}


def test_a_link_to_no_file_and_one_to_no_heading_are_told() -> None:
    text = "[a](docs/nowhere.md) [b](docs/benchmarks.md#nothing) [c](#own) [d](../outside.md) [e](docs/benchmarks.md)\n# Own\n"
    assert broken(ROOT / "README.md", text) == [
        "docs/nowhere.md: no such file", "docs/benchmarks.md#nothing: no such heading", "../outside.md: no such file",
    ]  # fmt: skip
