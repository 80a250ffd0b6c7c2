"""Serve's `user_config`: what it makes of a service's models, and that a faulty one stops nobody."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from deployments.config import parse_config
from deployments.lifecycle.desired import Desired
from tests.deployments.lifecycle.test_desired import manifests

__all__ = ["manifests"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import


def test_user_config_names_the_models_anew_and_a_faulty_one_is_logged(
    manifests: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from deployments.lifecycle.actor import reconfigure

    asked: list[Any] = []

    class Control:
        async def ask(self, method: str, desired: Desired, timeout_s: float, again: bool) -> dict[str, Any]:
            asked.append((method, desired.models["ctr"].live, again))
            return {}

    config = parse_config({"models": [{"path": str(manifests / "ctr-1")}], "models_root": str(manifests)}, "test")

    def said(**user_config: Any) -> None:
        asyncio.run(reconfigure(Control(), config, user_config))

    said(models=[{"path": str(manifests / "ctr-2")}])
    assert asked == [("become", "2", False)]
    for user_config, why in (
        ({"models": [{"path": "/etc"}]}, "models.0.path: got '/etc', which is '/etc', expected a place below models_root"),
        ({"models": []}, "user_config: models: got "),
        ({"models": [{"path": str(manifests / "nothing")}]}, "model.yaml: got no such file"),
        ({"mdls": []}, "user_config: mdls: got an unknown key"),
    ):
        with caplog.at_level(logging.ERROR):
            said(**user_config)
        assert "user_config: the models stay as they are: " in caplog.text
        assert why in caplog.text
    assert len(asked) == 1
