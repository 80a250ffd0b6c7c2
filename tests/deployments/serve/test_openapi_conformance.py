"""The OpenAPI document, held against the app by schemathesis: what it makes of it is answered as it says."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.deployments.live_app import LiveApp

pytestmark = [pytest.mark.bulk, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
NAMES = ("status_code_conformance", "response_schema_conformance", "content_type_conformance")
OURS = {500, 502, 503}  # not 504: what asks for a deadline of no time gets it
FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def statuses_of(operation: Any, checks: list[Any]) -> set[int]:
    """What an operation answers, once every answer is as the document says."""
    seen: set[int] = set()

    @FEW
    @given(case=operation.as_strategy(), known=st.booleans())
    def conforms(case: Any, known: bool) -> None:
        if known and "model" in case.path_parameters:
            case.path_parameters["model"] = "fake"
        seen.add(case.call_and_validate(checks=checks, timeout=20).status_code)

    conforms()
    return seen


def test_every_operation_answers_what_the_document_says_and_never_with_a_fault_of_ours() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    checks = [getattr(schemathesis.checks, name) for name in NAMES]
    answered: dict[str, set[int]] = {}
    with LiveApp() as app:
        document = schemathesis.openapi.from_url(f"{app.url}/openapi.json")
        for found in document.get_all_operations():
            operation = found.ok()
            answered[f"{operation.method.upper()} {operation.path}"] = statuses_of(operation, checks)
    assert answered["POST /v1/score"] >= {404, 422}
    assert 422 in answered["POST /v2/models/{model}/infer"]
    assert answered["GET /v2/models/{model}"] >= {200, 404}
    assert all(answered.values())
    faults = {name: seen & OURS for name, seen in answered.items() if seen & OURS}
    assert faults == {}
