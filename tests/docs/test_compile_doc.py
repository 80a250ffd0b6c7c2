"""The example of docs/compile.md runs as it stands, in a folder of its own."""

import os
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
    assert (tmp_path / "models" / "attention" / "graph.json").is_file()


def test_every_fence_has_a_language():
    assert [b.language for b in BLOCKS] == ["python", "text"]
