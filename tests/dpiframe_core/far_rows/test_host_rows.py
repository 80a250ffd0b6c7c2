"""Rows in the host's memory: copied while it is locked, by one process for all, whoever dies meanwhile."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dpiframe_core.far_rows import host_rows
from dpiframe_core.far_rows.host_rows import HostRows, RowSpan
from tests.dpiframe_core.embedding.test_tiers import Locked

TABLES = [torch.arange(5000, dtype=torch.float32).view(1000, 5), torch.arange(6000, dtype=torch.float16).view(2000, 3)]
ORDER = torch.arange(1000).flip(0)
SPANS = [RowSpan(TABLES[0], ORDER, 10, 700), RowSpan(TABLES[1], None, 0, 0), RowSpan(TABLES[1], None, 3, 2000)]
SIZE = 690 * 5 * 4 + 24 + 1997 * 3 * 2 + 50  # each table's bytes, up to a multiple of 128
WANTED = [TABLES[0][ORDER[10:700]], TABLES[1][:0], TABLES[1][3:]]


def are_there(rows: HostRows) -> bool:
    return all(torch.equal(*each) for each in zip(rows.tables, WANTED, strict=True))


@pytest.mark.parametrize("shared", [True, False])
def test_rows_are_copied_while_their_memory_is_locked(tmp_path, monkeypatch, shared):
    class Slow(Locked):
        """A lock that takes until the last row is there."""

        def __init__(self, memory):
            super().__init__(memory)
            for _ in range(1000):
                if memory[-128:].any():
                    return
                time.sleep(0.01)
            raise AssertionError("got no row while the memory was locked")

    monkeypatch.setattr(host_rows, "DeviceReadable", Slow)
    rows = HostRows(SPANS, tmp_path if shared else None, "rows")
    assert are_there(rows)
    assert rows.nbytes == SIZE
    assert [table.data_ptr() % 128 for table in rows.tables] == [rows.tables[0].data_ptr() % 128] * 3
    rows.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_of_a_process_that_died_before_it_was_filled_is_filled_by_who_waited(tmp_path, monkeypatch):
    locked = []

    class Noted(Locked):
        def __init__(self, memory):
            super().__init__(memory)
            locked.append(self)

    monkeypatch.setattr(host_rows, "DeviceReadable", Noted)
    code = (
        "import time\nfrom pathlib import Path\nfrom kernels.runtime.host_memory import SharedMemory\n"
        f"m = SharedMemory.claim(Path({str(tmp_path)!r}), 'rows', {SIZE})\nprint('in', flush=True)\ntime.sleep(60)"
    )
    with (
        ThreadPoolExecutor(1) as thread,
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdout.readline() == "in\n"
        waiting = thread.submit(HostRows, SPANS, tmp_path, "rows")
        while not locked and not waiting.done():  # though nothing is in it yet
            time.sleep(0.01)
        assert not waiting.done()
        other.kill()
        rows = waiting.result(60)
    assert are_there(rows)
    assert [one.closed for one in locked] == [True, False]
    rows.close()
    assert [one.closed for one in locked] == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_memory_for_all_that_cannot_be_locked_is_given_back_and_the_process_keeps_its_own(tmp_path, monkeypatch, caplog):
    class Refused(Locked):
        def __init__(self, memory):
            super().__init__(memory)
            if list(tmp_path.iterdir()):
                raise RuntimeError("host memory: got cudaErrorInvalidValue for 5 bytes, expected to lock them")

    monkeypatch.setattr(host_rows, "DeviceReadable", Refused)
    rows = HostRows(SPANS, tmp_path, "rows")
    assert are_there(rows)
    assert list(tmp_path.iterdir()) == []
    assert "this process keeps 0.0 GiB of rows for itself" in caplog.text
    rows.close()


def test_nothing_is_had_or_locked_for_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(host_rows, "DeviceReadable", None)
    rows = HostRows([RowSpan(TABLES[0], None, 5, 5)], tmp_path, "rows")
    assert [table.shape for table in rows.tables] == [(0, 5)]
    assert list(tmp_path.iterdir()) == []
    rows.close()


def test_what_a_copy_raises_that_is_no_lack_of_memory_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    with pytest.raises(IndexError):
        HostRows([RowSpan(TABLES[0], torch.full((1000,), 5000), 0, 1000)], tmp_path, "rows")
    assert list(tmp_path.iterdir()) == []
