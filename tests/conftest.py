"""Marks that need hardware are skipped with the reason; `--require-gpu` turns that skip into a failure. And `both_ways`."""

import importlib.util
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A deadline per example would be a timing test, and a flaky one on a busy machine.
settings.register_profile("dpiframe", deadline=None)
settings.load_profile("dpiframe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, rather than skip, tests marked gpu if there is no GPU")


@pytest.fixture(scope="module", params=["c", "numpy"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without what blocks.c does."""
    from kernels.runtime import c_build

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(c_build, "blocks", lambda: None)
        elif c_build.blocks() is None:
            pytest.skip("there is no C compiler, or no headers of Python")
        yield


def _gpus() -> int:
    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None:
        return 0
    return torch.cuda.device_count()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [(item, 2 if item.get_closest_marker("gpu2") else 1) for item in items if _marked(item)]
    if not wanted:
        return
    found = _gpus()
    for item, need in wanted:
        if found < need:
            if config.getoption("--require-gpu"):
                raise pytest.UsageError(f"--require-gpu: got {found} GPUs with CuPy, expected at least {need}")
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA GPU(s) with CuPy, found {found}"))


def _marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None or item.get_closest_marker("gpu2") is not None
