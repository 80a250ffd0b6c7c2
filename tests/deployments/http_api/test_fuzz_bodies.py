"""Some of the cases of `fuzz_bodies`, whose command runs any number of them (docs/lab-notes.md has 100,000)."""

import pytest

from tests.deployments.http_api.fuzz_bodies import Outcome, case, fuzz, seeds


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return fuzz(600)


def test_no_changed_body_is_a_fault_of_ours_and_polite_clients_keep_their_scores(outcome: Outcome) -> None:
    assert outcome.findings == []


def test_changed_bodies_reach_the_parsers_the_encoder_and_the_device(outcome: Outcome) -> None:
    assert outcome.statuses.keys() >= {200, 400, 422}
    assert min(outcome.statuses[status] for status in (200, 400, 422)) > 20


def test_a_number_is_one_case() -> None:
    right = seeds()
    assert case(7, right) == case(7, right) != case(8, right)
