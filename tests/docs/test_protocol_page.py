"""Every code block of docs/clients.md and protocol.md works, against the real app over the engine of a small demo model."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.config import Limits
from dpiframe_core.engine import Engine
from tests.deployments.live_app import LiveApp
from tests.docs.test_readme import RUN, Block, blocks

pytestmark = pytest.mark.bulk

ROOT = Path(__file__).parents[2]
BLOCKS = {
    f"{page}-line-{block.line}": block
    for page in ("clients", "protocol")
    for block in blocks((ROOT / "docs" / f"{page}.md").read_text())
    if block.language in RUN
}


@pytest.fixture(scope="module")
def page(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveApp, Path]]:
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(demo_bundle, folder / "models" / "demo")
    engine = Engine.load(folder / "models" / "demo", "cpu")
    engine.warmup()
    with LiveApp(engine, limits=Limits()) as live:
        yield live, folder
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_a_code_block_of_the_page_runs(block: Block, page: tuple[LiveApp, Path]) -> None:
    live, folder = page
    if "tritonclient" in block.code:
        pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
        pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    if "perf_analyzer" in block.code and shutil.which("perf_analyzer") is None:
        pytest.skip("perf_analyzer is not installed")
    code = block.code.replace("127.0.0.1:8000", live.address).replace("127.0.0.1:8001", live.grpc_address)
    assert code != block.code
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*RUN[block.language], code], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    if "curl" in code:
        assert '{"error":"context.I1: got nothing, expected the feature: of every candidate in candidates' in done.stdout
    elif "perf_analyzer" in code:
        assert "Throughput" in done.stdout
    elif "score_encoded" in code:
        assert done.stdout == "True\n"
    elif "grpc" in code:
        assert done.stdout == "True scores\n"
    else:
        assert "0." in done.stdout


def test_the_pages_show_code_in_both_languages() -> None:
    assert {block.language for block in BLOCKS.values()} == {"bash", "python"}
