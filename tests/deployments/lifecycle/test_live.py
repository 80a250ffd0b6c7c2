"""The fan-in as a user starts it: its versions change under load, and no request fails. Of two replicas: serve/test_faults."""

import json
from pathlib import Path

import pytest

from tests.deployments.lifecycle.live_versions import change_versions, write_versions
from tests.deployments.server_process import Server


@pytest.mark.ray
@pytest.mark.slow
def test_versions_of_a_fan_in_change_under_load_without_a_failed_request(demo_bundle: Path, tmp_path: Path) -> None:
    write_versions(demo_bundle, tmp_path)
    config = {
        "models": [{"path": str(tmp_path / "demo-1")}], "models_root": str(tmp_path), "topology": "fanin",
        "models_state": str(tmp_path / "state.json"), "replicas": 2, "cpus_per_replica": 0.5,
        "ingress_replicas": 2, "cpus_per_ingress": 0.5,
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    with Server(tmp_path / "config.yaml") as server:
        change_versions(server.wait_ready(), tmp_path / "config.yaml", tmp_path)
