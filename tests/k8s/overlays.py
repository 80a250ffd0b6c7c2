"""The overlays of k8s/ as `kubectl apply -k` would send them."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config import DeploymentConfig, parse_config
from tests.deployments.access.token_files import made

ROOT = Path(__file__).parents[2]
OWN_TOKENS = ("cpu-kind", "single-gpu", "multi-gpu")
OVERLAYS = (*OWN_TOKENS, "single-gpu-direct")


@cache
def built(folder: Path) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl here, whose kustomize builds the overlays")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def copied(to: Path) -> Path:
    """k8s/ with a file of tokens in each overlay that takes one, as a user makes it."""
    shutil.copytree(ROOT / "k8s", to / "k8s", dirs_exist_ok=True)
    for name in OWN_TOKENS:
        made(to / "k8s" / "overlays" / name / "tokens.yaml", ranker=["score"])
    return to / "k8s" / "overlays"


class Rendered:
    """An overlay's objects. Each asking gets copies of its own."""

    def __init__(self, folder: Path) -> None:
        self._text = built(folder)

    def of(self, kind: str) -> dict[str, Any]:
        (found,) = [one for one in self.all() if one["kind"] == kind]
        return found

    def all(self) -> list[dict[str, Any]]:
        return list(yaml.safe_load_all(self._text))

    @property
    def serve(self) -> dict[str, Any]:
        """What KubeRay hands to Serve."""
        read: dict[str, Any] = yaml.safe_load(self.of("RayService")["spec"]["serveConfigV2"])
        return read

    @property
    def config(self) -> DeploymentConfig:
        (application,) = self.serve["applications"]
        return parse_config(application["args"], "args")


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates, the head's first."""
    cluster = service["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def ray_containers(service: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for pod in pods(service):
        (container,) = pod["spec"]["containers"]
        found.append(container)
    return found


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container["env"]}
