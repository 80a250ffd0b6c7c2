"""How `pytest -n 4 --dist loadfile` divides the tests: files whole, those that start Ray with two workers, long ones first.

A cluster mostly waits, so two chains of them go side by side, and two workers compute meanwhile; more chains would wait for
each other's start longer than their tests do.
A file's tests share its fixtures. xdist's own groups say the same, but not with every pytest: 9.2 ignores them.
"""

import gc
import logging
import os
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_BULK = re.compile(r"^pytestmark = .*pytest\.mark\.bulk", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """libgomp spins between parallel regions, for milliseconds; where other tests run on the same cores that is all it does.

    There Inductor, too, has no use for a pool of compilers, processes that import torch each, and need not find out by programs
    of its own whether the CPU has what it says.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `dpiframe serve` has it
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    gc.disable()  # until all is collected: a fifth of that time it would look through what stays


def _chain_of(file: Path) -> str:
    """Of a file that starts Ray: those of serve/ take about as long as all others."""
    return "ray of serve" if file.parent.name == "serve" else "ray"


@cache
def starts_ray(file: Path) -> bool:
    """Some test in it does, as it says: who gives out the tests knows their names alone."""
    return "pytest.mark.ray" in file.read_text()


def _traces(file: Path) -> bool:
    return not {"compiler", "importers", "fusion"}.isdisjoint(file.parts)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which nothing would be run is not imported: the libraries that models are compared with take long."""
    left_out = "not bulk" in config.option.markexpr and collection_path.suffix == ".py"
    return True if left_out and _BULK.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    sizes = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    # Workers take files in this order: at the end there are some of few fast tests for the one that is done first.
    # What traces modules comes first: two workers do it while two wait for Ray, and alone import Dynamo and the libraries.
    items.sort(key=lambda i: (not starts_ray(i.path), not _traces(i.path), i.path not in slow, -sizes[i.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            path = config.rootpath / file
            return _chain_of(path) if starts_ray(path) else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """pytest adds its handlers to each logger that does not propagate, torch's 40, six times a test; and a logger that has one
    makes torch write a trace of all that it exports, a tenth of that time. Of those that propagate root's handlers hear.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)  # xdist's own loop answers, and nobody is asked after it
def pytest_runtestloop(session: pytest.Session) -> None:
    """Each worker's share of the cores for torch, as for a replica beside others; what a test starts is not told.

    And less work for the garbage collector, a seventh of all there is: what was collected and imported stays, and is looked
    through no more; most of what a test makes is gone before there is much of it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and "torch" in sys.modules:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A hint, not a failure: a busy machine is slower."""
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and report.duration > 10 and "slow" not in report.keywords:
            terminalreporter.write_line(f"{report.duration:.0f} s, without the marker slow: {report.nodeid}")
