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


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's folder, and what it printed there."""
    code = "\n".join(b.code for b in BLOCKS if b.language == "python")
    folder = tmp_path_factory.mktemp("compile")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder, done.stdout


def test_the_example_runs(example):
    folder, printed = example
    assert "largest deviation on the example" in printed
    assert all((folder / "models" / "attention" / name).is_file() for name in ("graph.json", "example.json"))
    assert (folder / "models" / "by-name" / "vocab" / "user.parquet").is_file()


def test_the_summary_on_the_page_is_that_of_its_example_but_for_the_times(example):
    (shown,) = (b.code for b in BLOCKS if b.language == "text" and "after fusion" in b.code)
    for line in shown.splitlines():
        fixed = re.split(r"; scores within|[\d.]+ ms", line)[0]
        assert any(printed.startswith(fixed) for printed in example[1].splitlines()), fixed


def test_every_fence_has_a_language():
    assert [b.language for b in BLOCKS] == ["python", "text", "python", "python", "text"]
