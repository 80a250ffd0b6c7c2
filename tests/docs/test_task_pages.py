"""The commands of the pages for tasks work as they stand, beside a service of a small demo model; and every key that the page
of the configuration names is there, with the default that it says.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.config import Limits, parse_config
from deployments.config_clients import Grpc
from deployments.config_load import Autoscaling
from deployments.config_observed import ScoreLog, Tracing
from dpiframe_core.engine import Engine
from dpiframe_core.strict_yaml import load_yaml
from tests.deployments.command import dpiframe_here
from tests.deployments.live_app import LiveApp
from tests.docs.test_readme import RUN, Block, blocks

ROOT = Path(__file__).parents[2]
SAID = {  # page -> what each of its commands prints, or writes
    "serving": ["configs/demo.yaml: ok"],
    "requests": ['"scores":[', "[0."],
    "security": [""],
    "tuning": ["max_batch_rows: 4096"],
    "profile": ["", "Plan: breadth_first"],
    "compress": ["golden rows"],
    "capacity": ["needed      2 nodes: 2 GPUs, 2 engines, 12 ingresses, 32 cores"],
    "placement": ["predicted lookup of 1,000 rows"],
}
HERE = {"profile", "compress", "placement"}  # in this process, as each start imports torch; the README's are started
BLOCKS = [
    (page, i, b)
    for page in SAID
    for i, b in enumerate(b for b in blocks((ROOT / "docs" / f"{page}.md").read_text()) if b.language in RUN)
]


@pytest.fixture(scope="module")
def service(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveApp, Path]]:
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(demo_bundle, folder / "models" / "demo")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "bin").mkdir()
    command = folder / "bin" / "dpiframe"  # this checkout's, whatever is installed
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from deployments.cli.main import command; command()' \"$@\"\n")
    command.chmod(0o755)
    engine = Engine.load(folder / "models" / "demo", "cpu")
    engine.warmup()
    example = engine.bundle.example
    assert example is not None
    engine.score(example["candidates"], example["context"])  # a batch to tune for
    with LiveApp(engine, limits=Limits()) as live:
        yield live, folder
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "i", "block"), BLOCKS, ids=[f"{page}-{i}" for page, i, _ in BLOCKS])
def test_a_command_of_a_page_runs(page: str, i: int, block: Block, service: tuple[LiveApp, Path]) -> None:
    live, folder = service
    if page in HERE:
        name, *arguments = shlex.split(block.code)
        assert name == "dpiframe"
        here = dpiframe_here(*arguments, cwd=folder)
        assert (here.returncode, SAID[page][i] in here.stdout) == (0, True), here.stdout
        return
    code = block.code.replace("127.0.0.1:8000", live.address)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*RUN[block.language], code], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert SAID[page][i] in done.stdout, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path) -> None:
    (block,) = (b for b in blocks((ROOT / "docs" / "operate.md").read_text()) if b.language == "ini")
    unit = tmp_path / "dpiframe.service"
    unit.write_text(block.code.replace("/opt/dpiframe/.venv/bin/dpiframe", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_page_shows_as_many_commands_as_are_run() -> None:
    for page, said in SAID.items():
        assert sum(name == page for name, _, _ in BLOCKS) == len(said), page


def keys(model: BaseModel) -> dict[str, Any]:
    return {
        name: keys(value) if isinstance(value := getattr(model, name), BaseModel) else value
        for name in type(model).model_fields
    }


def test_the_configuration_page_has_every_key_with_its_default() -> None:
    (block,) = (b for b in blocks((ROOT / "docs" / "api" / "config.md").read_text()) if b.language == "yaml")
    given = load_yaml(block.code.encode())
    config = parse_config({"models": given["models"]}, "defaults")
    alternatives = {"replicas", "ingress_replicas", "cpus_per_ingress"}  # what another key of the page excludes
    shown = keys(parse_config({k: v for k, v in given.items() if k not in alternatives}, "page"))
    defaults = keys(config) | {"grpc": keys(Grpc()), "autoscaling": keys(Autoscaling(max_replicas=8))}
    defaults |= {"tracing": keys(Tracing(endpoint=given["tracing"]["endpoint"]))}
    defaults |= {"score_log": keys(ScoreLog(folder=given["score_log"]["folder"]))}
    assert shown == defaults
    assert {name: given[name] for name in alternatives} == {name: defaults[name] for name in alternatives}
    assert given.keys() == defaults.keys()
    for name in ("http", "grpc", "batching", "limits", "autoscaling"):
        assert given[name].keys() == defaults[name].keys(), name
