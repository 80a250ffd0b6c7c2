"""Tests marked for GPUs, where there are none: skipped, or failed if that is asked for. Each case is a run of its own."""

import re
from pathlib import Path

import pytest

from tests.test_run_guard import run

pytestmark = pytest.mark.bulk

CODE = """
import pytest

@pytest.mark.gpu
def test_one():
    pass

@pytest.mark.gpu2
def test_two():
    pass

def test_none():
    pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["alone", "workers"])
@pytest.mark.parametrize(("option", "outcome"), [((), "skipped"), (("--require-gpu",), "error")])
def test_a_gpu_that_is_missing_is_told_by_the_tests_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...], option: tuple[str, ...], outcome: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(tmp_path, CODE, "-p", "tests.conftest", "-m", "not gpu2", "-W", "ignore", *option, *workers)
    assert re.search(f"^1 passed,( 1 deselected,)? 1 {outcome}", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "needs 1 CUDA GPU(s) with CuPy, found 0" in done.stdout or not option
