"""What `make docs` does not see: links of pages outside docs/, what becomes of links that leave it, imports of the API pages."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.hooks import without_outer_links
from tests.test_readme import ROOT, blocks

OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "k8s/README.md")]
SOURCE = ROOT / "docs" / "serving.md"
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as viewers of repositories and MkDocs alike make them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for path, anchor in _LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}" if anchor else path)
    return dead


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_outside_docs_leads_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_out_of_docs_leads_somewhere(page: Path) -> None:
    links = [match[0] for match in _LINK.finditer(page.read_text()) if match[1].startswith("../")]
    assert dead_links(page, " ".join(links)) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](docs/serving.md) [b](docs/gone.md) [c](docs/serving.md#topologies) [d](docs/serving.md#gone) [e](https://x.org)"
    assert dead_links(ROOT / "README.md", text) == ["docs/gone.md", "docs/serving.md#gone"]


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("[figures](../benchmarks/results/h200/RESULTS.md#serving)", "figures (`benchmarks/results/h200/RESULTS.md`)"),
        ("[configs/demo.yaml](../configs/demo.yaml)", "`configs/demo.yaml`"),
        ("[`configs/demo.yaml`](../configs/demo.yaml)", "`configs/demo.yaml`"),
        ("[errors](errors.md#x) and [there](https://x.org)", "[errors](errors.md#x) and [there](https://x.org)"),
        ("![a picture](../benchmarks/x.png)", "![a picture](../benchmarks/x.png)"),
    ],
)
def test_a_link_out_of_docs_becomes_a_path(text: str, becomes: str) -> None:
    assert without_outer_links(text, SOURCE) == becomes


def test_a_link_between_pages_of_docs_stays() -> None:
    assert without_outer_links("[x](../errors.md)", ROOT / "docs" / "api" / "errors.md") == "[x](../errors.md)"


def test_a_link_out_of_docs_to_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mkdocs.hooks"):
        without_outer_links("[x](../configs/gone.yaml)", SOURCE)
    assert caplog.messages == ["serving.md: got a link to ../configs/gone.yaml, expected a file of the repository"]


def test_the_imports_of_the_api_pages_work() -> None:
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    imports = [line for page in pages for line in re.findall(r"from \w+(?:\.\w+)* import [^`\n]+", page.read_text())]
    assert len(imports) >= len(pages)
    code = "\n".join([*imports, ""])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_every_code_block_of_a_page_names_its_language() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert all(block.language for block in blocks(page.read_text())), page.name
