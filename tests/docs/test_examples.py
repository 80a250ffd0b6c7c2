"""The examples run as a user runs them: to the bundle, and to the endpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT
from tests.dpiframe_core.importers.peers import library

LIBRARIES = {"deepctr_torch_to_endpoint": "deepctr_torch", "fuxictr_to_endpoint": "fuxictr"}
DEEPCTR, FUXICTR = (ROOT / "examples" / f"{name}.py" for name in LIBRARIES)


def run(example: Path, *args: str) -> str:
    library(LIBRARIES[example.stem])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(example), *args], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def went_to_a_bundle(out: str) -> bool:
    return "|dp| max" in out and "AUC: source 0." in out


@pytest.mark.slow
def test_an_example_ends_with_a_bundle_if_told_to() -> None:
    """The one of which only `--whole` goes on to the endpoint."""
    assert went_to_a_bundle(run(DEEPCTR, "--no-serve"))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", [FUXICTR, pytest.param(DEEPCTR, marks=pytest.mark.whole)], ids=lambda path: path.stem)
def test_an_example_goes_from_training_to_a_bundle_and_to_the_endpoint(example: Path) -> None:
    out = run(example)
    assert went_to_a_bundle(out)
    assert [line for line in out.splitlines() if line.startswith("[0.") and line.endswith("]")], "the scores of its request"
