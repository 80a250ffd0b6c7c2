"""Some of the cases of `fuzz.both_ways`, whose command runs any number of them (docs/security.md)."""

from pathlib import Path

import pytest

from kernels.runtime import c_build
from tests.deployments.sanitized import run_sanitized
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
@pytest.mark.parametrize("cases", ["500", pytest.param("20000", marks=pytest.mark.whole)])
def test_no_damaged_arrow_stream_has_c_read_beyond_its_bytes(cases: str, run_folder: Path) -> None:
    run_sanitized("tests.deployments.scoring.fuzz.both_ways", ("1", cases, "streams"), run_folder, 1500)
