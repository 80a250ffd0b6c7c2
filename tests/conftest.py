"""Marks that need hardware are skipped with the reason; `--require-gpu` turns that skip into a failure. And shared fixtures.

Of a test marked `covering` a run takes few combinations of parameters, on a GPU all; with `--whole`, as `make test-slow`, all.
"""

import importlib.util
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import settings

from tests.made_once import made_once

pytest_plugins = ["tests.run_plugin", "tests.run_workers"]


# A deadline per example would be a timing test, and a flaky one on a busy machine.
settings.register_profile("whole", deadline=None)
settings.register_profile("run", deadline=None, max_examples=20)
settings.load_profile("run")  # here: a test has what holds where it is imported, and a room's conftest may do that


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--whole"):
        settings.load_profile("whole")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="take every combination of parameters, and 100 examples of Hypothesis"
    )
    parser.addoption("--require-gpu", action="store_true", help="fail, rather than skip, tests marked gpu if there is no GPU")


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """By default httpx gives up after five seconds; a busy host may take longer. And each client reads all certificates that it
    trusts, 30 ms of a CPU: here all of a process have one context."""
    if "httpx" in sys.modules:
        transport = sys.modules["httpx"]._transports.default
        transport.create_ssl_context = cache(transport.create_ssl_context)
        own = sys.modules["httpx"]._config.DEFAULT_TIMEOUT_CONFIG
        own.connect = own.read = own.write = own.pool = 60.0


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk() -> Iterator[None]:
    """Bundles are written by the thousand, of dozens of files each, and none is to outlive a power failure: to sync them would
    be most of the time that an import takes. What a test starts does sync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def run_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run have in common; see `made_once`."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture
def first_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of waves and of layers compute in the same tiles, whatever each would find fastest: tiles differ by rounding."""
    for module in ("kernels.waves.wave", "kernels.dense.linear"):
        monkeypatch.setattr(f"{module}.ranked", lambda ways: [next(iter(ways))])


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


def _given(item: pytest.Item) -> list[tuple[object, str]]:
    """What each `parametrize` gives it: pytest numbers the combinations alone."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    return [(n, repr([item.callspec.params[one] for one in ([n] if isinstance(n, str) else n)])) for n in names]


def taken(items: list[pytest.Item], at_once: int) -> set[pytest.Item]:
    """Few items with every combination that some item has of so many parameters' values; values alone come about as often."""
    given = {item: _given(item) for item in items}
    held = {item: set(combinations(values, at_once)) for item, values in given.items()}
    left, often, chosen = set().union(*held.values()), Counter(), set()
    while left:
        best = max(items, key=lambda item: (len(held[item] & left), -sum(often[v] for v in given[item])))
        left -= held[best]
        often.update(given[best])
        chosen.add(best)
    return chosen


def _leave_out(config: pytest.Config, items: list[pytest.Item], lacking: list[pytest.Item]) -> None:
    """Of tests marked `covering` what adds nothing; what is marked `whole`; and of a test that lacks a GPU all but one."""
    tests = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("covering")) and not item.get_closest_marker("gpu"):
            tests[item.path, item.originalname, *mark.args].append(item)
    left_out = {item for item in items if item.get_closest_marker("whole")}
    left_out |= {item for (*_, at_once), same in tests.items() for item in set(same) - taken(same, at_once)}
    told = {(item.path, item.originalname): item for item in lacking if item not in left_out}
    left_out |= {*lacking} - {*told.values()}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lacking = [] if config.getoption("--require-gpu") else [item for item in items if _marked(item) and _lacks(item)]
    for item in lacking:
        item.add_marker(pytest.mark.skip(reason=_lacks(item)))
    if not config.getoption("--whole"):
        _leave_out(config, items, lacking)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Here, not at the collection: a worker of xdist that ends there takes pytest along, and `-m` has not chosen by then."""
    if item.config.getoption("--require-gpu") and _marked(item) and (lacks := _lacks(item)):
        pytest.fail(lacks, pytrace=False)


def _marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None or item.get_closest_marker("gpu2") is not None
