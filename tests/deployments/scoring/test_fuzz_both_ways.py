"""Some of the cases of `fuzz.both_ways`, whose command runs any number of them (docs/security.md)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.runtime import c_build
from tests.deployments.direct.test_fuzz import SANITIZERS
from tests.deployments.scoring.fuzz.both_ways import Outcome, case, fuzz

pytestmark = pytest.mark.skipif(c_build.request_extension() is None, reason="there is no C compiler, or no headers of Python")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return fuzz(7, 3000)


def test_c_reads_of_every_request_what_python_reads_or_refuses_it_alike(outcome: Outcome) -> None:
    assert outcome.findings == []


def test_each_form_is_read_and_refused(outcome: Outcome) -> None:
    assert (
        min(
            outcome.kinds[f"{form} {end}"] for form in ("bodies", "arrays", "streams", "tensors") for end in ("read", "refused")
        )
        > 50
    )
    assert outcome.packed > 100 < outcome.in_place


def test_a_number_is_one_case() -> None:
    assert case(3, 9)[2] == case(3, 9)[2] != case(3, 10)[2]


@pytest.mark.slow
def test_no_damaged_arrow_stream_has_c_read_beyond_its_bytes(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the compiler has no sanitizers")
    environment = os.environ | {
        "CC": f"{compiler} {' '.join(SANITIZERS)} -g",
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONMALLOC": "malloc",  # else bytes lie side by side, and what is read behind one's end is another's
    }
    command = [sys.executable, "-m", "tests.deployments.scoring.fuzz.both_ways", "1", "20000", "streams"]
    root = Path(__file__).parents[3]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment, timeout=1500)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
