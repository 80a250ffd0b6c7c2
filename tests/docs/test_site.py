"""What a strict build of the site does not see: what becomes of links that leave docs/, and the imports of the API pages.

Links that lead nowhere are the build's, and `test_links`'.
"""

import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.docs.test_readme import ROOT, blocks

SOURCE = ROOT / "docs" / "serving.md"


@pytest.fixture
def hooks() -> Any:
    return pytest.importorskip("docs.hooks", reason="MkDocs is not installed", exc_type=ImportError)


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("[figures](../benchmarks/results/h200/RESULTS.md#serving)", "[figures](results/h200/RESULTS.md#serving)"),
        ("![a picture](../benchmarks/results/h200/floor.png)", "![a picture](results/h200/floor.png)"),
        ("[configs/demo.yaml](../configs/demo.yaml)", "`configs/demo.yaml`"),
        ("[`configs/demo.yaml`](../configs/demo.yaml)", "`configs/demo.yaml`"),
        ("[configs/](../configs)", "`configs`"),
        ("[the image](../Dockerfile)", "the image (`Dockerfile`)"),
        ("[errors](errors.md#x) and [there](https://x.org)", "[errors](errors.md#x) and [there](https://x.org)"),
    ],
)
def test_a_link_out_of_docs_leads_to_a_record_or_becomes_a_path(hooks: Any, text: str, becomes: str) -> None:
    assert hooks.mended(text, SOURCE, "serving.md") == becomes


def test_a_link_between_pages_leads_from_where_the_site_has_them(hooks: Any) -> None:
    api, record = ROOT / "docs" / "api" / "errors.md", ROOT / "benchmarks" / "results" / "h200" / "RESULTS.md"
    assert hooks.mended("[x](../errors.md)", api, "api/errors.md") == "[x](../errors.md)"
    text = "[x](../../../docs/benchmarks.md#rules)"
    assert hooks.mended(text, record, "results/h200/RESULTS.md") == "[x](../../benchmarks.md#rules)"


def test_a_link_to_no_file_is_a_warning(hooks: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mkdocs.hooks"):
        hooks.mended("[x](../configs/gone.yaml)", SOURCE, "serving.md")
    assert caplog.messages == ["serving.md: got a link to ../configs/gone.yaml, expected a file of the repository"]


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="https://cdn.example/a.js"></script>', 1),
        ("<script src=//cdn.example/a.js></script>", 1),
        ('<link rel="stylesheet" href="https://fonts.example/css">', 1),
        ('<img alt="" src="http://x.example/p.png"><img src="img/p.png">', 1),
        ('<script src="assets/bundle.js"></script><link href="site.css"><a href="https://x.example">there</a>', 0),
        ('<code>&lt;script src="https://cdn.example/a.js"&gt;</code>', 0),
    ],
)
def test_what_a_page_loads_from_another_host_is_found_and_links_are_not(hooks: Any, html: str, loads: int) -> None:
    assert len(hooks.loads_of(html)) == loads


@pytest.mark.bulk
def test_the_imports_of_the_api_pages_work() -> None:
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    imports = [line for page in pages for line in re.findall(r"from \w+(?:\.\w+)* import [^`\n]+", page.read_text())]
    assert len(imports) >= len(pages)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(imports)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_code_block_of_a_page_names_its_language() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert all(block.language for block in blocks(page.read_text())), page.name
