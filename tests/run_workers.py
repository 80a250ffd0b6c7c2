"""How `pytest -n` divides the tests: what starts Ray stays with one worker, as does a file, and long files do not come last.

Real clusters side by side would wait for each other's start longer than their tests do; the other workers compute meanwhile.
So would tests of a GPU for its memory. A file's tests share its fixtures.
"""

import os
import sys
from collections import Counter

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """libgomp spins between parallel regions, for milliseconds; where other tests run on the same cores that is all it does."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `dpiframe serve` has it


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not getattr(config.option, "loadgroup", False):
        return
    sizes = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    groups = {}
    for item in items:
        kinds = ("ray", "ray"), ("gpu", "gpu"), ("gpu2", "gpu")
        own = (group for mark, group in kinds if item.get_closest_marker(mark))
        groups[item] = next(own, str(item.path.relative_to(config.rootpath)))
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    # Workers take groups in this order: at the end there are files of a few fast tests for the one that is done first.
    items.sort(key=lambda item: (groups[item] != "ray", groups[item] != "gpu", item.path not in slow, -sizes[item.path]))


def pytest_runtestloop(session: pytest.Session) -> None:
    """Each worker's share of the cores for torch, as for a replica beside others; what a test starts is not told."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and "torch" in sys.modules:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A hint, not a failure: a busy machine is slower."""
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and report.duration > 10 and "slow" not in report.keywords:
            terminalreporter.write_line(f"{report.duration:.0f} s, without the marker slow: {report.nodeid}")
