"""The example of docs/compile.md runs as it stands, in a folder of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_readme import blocks

pytestmark = pytest.mark.bulk

ROOT = Path(__file__).parents[2]
BLOCKS = blocks((ROOT / "docs" / "compile.md").read_text())


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda block: f"line-{block.line}")
def test_the_example_runs(block, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", block.code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "largest deviation on the example" in done.stdout
    assert all((tmp_path / "models" / "attention" / name).is_file() for name in ("graph.json", "example.json"))


def test_the_summary_on_the_page_is_that_of_its_example_but_for_the_times(tmp_path):
    (shown,) = (b.code for b in BLOCKS if b.language == "text" and "after fusion" in b.code)
    (block,) = (b for b in BLOCKS if b.language == "python")
    done = subprocess.run(
        [sys.executable, "-c", block.code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    for line in shown.splitlines():
        fixed = re.split(r"; scores within|[\d.]+ ms", line)[0]
        assert any(printed.startswith(fixed) for printed in done.stdout.splitlines()), fixed


def test_every_fence_has_a_language():
    assert [b.language for b in BLOCKS] == ["python", "text", "text"]
