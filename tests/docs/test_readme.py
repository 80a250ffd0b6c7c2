"""Every code block of the README works: bash in the repository with the environment's programs first, python too.

A block that a test cannot run (it stays up, it is the test command itself) says so in the line before its fence:
<!-- not run: REASON -->
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MOST_LINES = 140
STAMP = ROOT / ".venv" / ".installed"
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
SCORE = re.compile(r"│ \d+ +│ (0\.\d+) │")
RUN = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


class Block(NamedTuple):
    line: int
    language: str
    reason: str | None
    code: str


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(line, match["language"], match["reason"], match["code"]))
    return found


BLOCKS = blocks(README.read_text()) if README.exists() else []


@pytest.mark.slow
@pytest.mark.ray  # the first of them, which builds the model that others need
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in RUN], ids=lambda block: f"line-{block.line}")
def test_a_code_block_of_the_readme_runs(block: Block) -> None:
    if block.reason:
        pytest.skip(f"the README says: {block.reason}")
    if "make " in block.code and (STAMP.parent.is_symlink() or not STAMP.exists()):
        pytest.skip("make would install first: this environment was not made by `make`, or is another clone's")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [*RUN[block.language], block.code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
    if block.code == "make demo\n":
        shown, printed = ([float(score) for score in SCORE.findall(text)] for text in (README.read_text(), done.stdout))
        assert shown == pytest.approx(printed[: len(shown)], abs=0.02)  # another PyTorch or CPU trains a slightly other model


def test_the_readme_shows_code_that_runs() -> None:
    if not README.exists():
        pytest.skip("there is no README yet")
    run = [block for block in BLOCKS if block.language in RUN and not block.reason]
    assert {block.language for block in run} == set(RUN)
    assert all(block.language for block in BLOCKS), "a fence without a language would be skipped in silence"


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_blocks_are_found_with_language_line_and_reason() -> None:
    text = "# T\n```bash\nmake demo\n```\nthen\n<!-- not run: it stays up -->\n```bash\nmake serve\n```\n```json\n{}\n```\n"
    assert blocks(text) == [
        Block(2, "bash", None, "make demo\n"),
        Block(7, "bash", "it stays up", "make serve\n"),
        Block(10, "json", None, "{}\n"),
    ]
