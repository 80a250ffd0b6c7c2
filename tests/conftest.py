"""Marks that need hardware are skipped with the reason; `--require-gpu` turns that skip into a failure. And shared fixtures."""

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from tests.made_once import made_once

pytest_plugins = ["tests.run_plugin", "tests.run_workers"]

# A deadline per example would be a timing test, and a flaky one on a busy machine.
settings.register_profile("dpiframe", deadline=None)
settings.load_profile("dpiframe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, rather than skip, tests marked gpu if there is no GPU")


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """By default httpx gives up after five seconds; a busy host may take longer."""
    if "httpx" in sys.modules:
        own = sys.modules["httpx"]._config.DEFAULT_TIMEOUT_CONFIG
        own.connect = own.read = own.write = own.pool = 60.0


@pytest.fixture(scope="session")
def run_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run have in common; see `made_once`."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="session")
def demo_bundle(run_folder: Path) -> Path:
    """A small demo model, with its example.json; not to be written to."""
    from deployments.demo.export import build_demo_bundle

    return made_once(run_folder / "small", lambda path: build_demo_bundle(path, rows=4000, progress=False))


@pytest.fixture(scope="module", params=["c", "numpy"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without what blocks.c does."""
    from kernels.runtime import c_build

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(c_build, "request_extension", lambda: None)
        elif c_build.request_extension() is None:
            pytest.skip("there is no C compiler, or no headers of Python")
        yield


@cache
def _gpus() -> int:
    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None:
        return 0
    return torch.cuda.device_count()


def _lacks(item: pytest.Item) -> str | None:
    """What it needs and this machine has not."""
    need = 2 if item.get_closest_marker("gpu2") else 1
    return None if _gpus() >= need else f"needs {need} CUDA GPU(s) with CuPy, found {_gpus()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--require-gpu"):
        return
    for item in filter(_marked, items):
        if lacks := _lacks(item):
            item.add_marker(pytest.mark.skip(reason=lacks))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Here, not at the collection: a worker of xdist that ends there takes pytest along, and `-m` has not chosen by then."""
    if item.config.getoption("--require-gpu") and _marked(item) and (lacks := _lacks(item)):
        pytest.fail(lacks, pytrace=False)


def _marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None or item.get_closest_marker("gpu2") is not None
