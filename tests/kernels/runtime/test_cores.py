"""The cores of a process: those that it may run on, within the time that its control groups have."""

import math
import os
from pathlib import Path

import pytest

from kernels.runtime import cores
from kernels.runtime.cores import cpu_quota, usable_cores

V1 = "12:cpu,cpuacct:{path}\n11:cpuset:/other\n1:name=systemd:/\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "fs"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "600000 100000\n"}, 6.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/pods/one\n", {"pods/one/cpu.max": "max 100000", "pods/cpu.max": "250000 100000", "cpu.max": "max 1"}, 2.5),
        ("0::/pods/one\n", {"pods/one/cpu.max": "50000 100000", "pods/cpu.max": "250000 100000"}, 0.5),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000"}, 4.0),  # in a container that sees its own group alone
        (V1.format(path="/docker/a"), {"cpu,cpuacct/docker/a/cpu.cfs_quota_us": "300000",
                                       "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000"}, 3.0),
        (V1.format(path="/docker/a"), {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3.0),
        (V1.format(path="/"), {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/\n", {"cpu.max": "nonsense"}, math.inf),
        ("0::/\n", {}, math.inf),
    ],
)  # fmt: skip
def test_the_least_limit_of_the_groups_counts(tmp_path, groups, files, expected):
    (tmp_path / "cgroup").write_text(groups)
    assert cpu_quota(tmp_path / "cgroup", tree(tmp_path, files)) == expected


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cpu_quota(tmp_path / "cgroup", tmp_path) == math.inf


@pytest.mark.parametrize(("quota", "expected"), [(0.2, 1), (1.0, 1), (1.5, 2), (6.0, 6), (9.0, 8), (math.inf, 8)])
def test_a_part_of_a_core_is_one_and_no_process_has_more_than_it_may_run_on(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert usable_cores() == expected


def test_this_process_has_at_least_a_core():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
