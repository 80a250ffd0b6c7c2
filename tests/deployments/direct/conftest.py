"""Tests of this folder that use a `Service`, or a `Replica` of the lifecycle's, reach it over its direct port."""

import pytest

from tests.deployments.lifecycle.test_serving import Replica
from tests.deployments.serve.test_http_app import Service


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "direct", True)
    monkeypatch.setattr(Replica, "direct", True)
