"""Tests of this folder that use a `Service` reach its direct port by a Unix socket."""

from pathlib import Path

import pytest

from tests.deployments.serve.test_http_app import Service


@pytest.fixture(autouse=True)
def by_socket_file(direct: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Service, "socket_path", tmp_path / "score.sock")
