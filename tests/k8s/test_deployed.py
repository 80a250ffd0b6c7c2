"""The Serve configuration that the overlay `cpu-kind` embeds, deployed on a cluster of this host: what it names is there."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.deployments.access.token_files import bearing, made
from tests.deployments.own_ports import own_port
from tests.k8s.overlays import ROOT, Rendered, copied, environment, ray_containers

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_the_embedded_configuration_is_deployed_and_scores_and_answers_its_probe(demo_bundle: Path, tmp_path: Path) -> None:
    overlay = Rendered(copied(tmp_path) / "cpu-kind")
    _, worker = ray_containers(overlay.of("RayService"))
    serve = overlay.serve
    (application,) = serve["applications"]
    args = application["args"]
    # All that is of this host: a port, and where the files lie.
    port = own_port()
    serve["http_options"]["port"] = args["http"]["port"] = port
    tokens = made(tmp_path / "tokens.yaml", ranker=["score"], boss=["admin"])
    args["access"]["tokens"] = str(tmp_path / "tokens.yaml")
    args["models_root"] = str(demo_bundle.parent)
    args["models"][0]["path"] = str(demo_bundle)
    variables = {name: value for name, value in environment(worker).items() if name != "XDG_CACHE_HOME"}
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"serve": serve, "environment": variables}))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.k8s.serve_embedded", str(file)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if line == "ready\n":
                break
        else:
            pytest.fail(said)
        url = f"http://127.0.0.1:{port}"
        probe = worker["readinessProbe"]["httpGet"]["path"]
        give_up = time.monotonic() + 60
        while httpx.get(url + probe).status_code != 200:  # HAProxy's new configuration comes a moment later
            assert time.monotonic() < give_up
            time.sleep(0.1)
        example = (demo_bundle / "example.json").read_bytes()
        assert httpx.post(f"{url}/v1/score", content=example).status_code == 401
        answer = httpx.post(f"{url}/v1/score", content=example, headers=bearing(tokens["ranker"]))
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["scores"]) == len(next(iter(json.loads(example)["candidates"].values())))
        # `user_config` names another version: it is loaded and answers, and no replica is started for that.
        admin, versions = bearing(tokens["boss"]), f"{url}/v1/models/{answer.json()['model']}/versions"
        before = {replica["id"] for replica in httpx.get(versions, headers=admin).json()["replicas"]}
        overrides = application.setdefault("deployments", [])
        if not any(deployment["name"] == "Replica" for deployment in overrides):
            overrides.append({"name": "Replica"})
        replica = next(deployment for deployment in overrides if deployment["name"] == "Replica")
        replica["user_config"] = {"models": [{"path": str(demo_bundle), "version": "of-user-config"}]}
        process.stdin.write(json.dumps(serve) + "\n")
        process.stdin.flush()
        give_up = time.monotonic() + 90
        while answer.json()["version"] != "of-user-config":
            assert time.monotonic() < give_up
            time.sleep(0.1)
            answer = httpx.post(f"{url}/v1/score", content=example, headers=bearing(tokens["ranker"]))
            assert answer.status_code == 200, answer.text
        assert {replica["id"] for replica in httpx.get(versions, headers=admin).json()["replicas"]} == before
        page = httpx.get(f"{url}/")
        assert "<h1>DPIFrame</h1>" in page.text
        for name in ("main.js", "page.css"):
            assert httpx.get(f"{url}/page/{name}").status_code == 200
    finally:
        process.stdin.close()
        said += process.stdout.read()  # to its end
        process.stdout.close()
        process.wait(60)
    assert process.returncode == 0, said
