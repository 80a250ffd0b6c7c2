"""Rows of files come to their places, whatever their order, in parts and beside one another."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.far_rows import row_copies
from dpiframe_core.far_rows.row_copies import RowCopies

DTYPES = [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn]


def table_of(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    raw = np.random.default_rng(rows * dim).integers(0, 256, (rows, dim * dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def raw(tensor: torch.Tensor) -> list[list[int]]:
    return tensor.cpu().view(torch.uint8).tolist()


@given(st.data())
def test_each_rank_has_its_row(data: st.DataObject) -> None:
    rows, dim, dtype = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5)), data.draw(st.sampled_from(DTYPES))
    start, end = sorted(data.draw(st.lists(st.integers(0, rows), min_size=2, max_size=2)))
    order = data.draw(st.none() | st.permutations(range(rows)))
    part_bytes = data.draw(st.integers(1, 100))
    table = table_of(rows, dim, dtype)
    to = torch.zeros(end - start, dim).to(dtype)
    with pytest.MonkeyPatch.context() as patch, RowCopies() as copies:
        patch.setattr(row_copies, "_PART_BYTES", part_bytes)
        copies.add(table, None if order is None else torch.tensor(order), start, end, to)
        copies.wait()
    assert raw(to) == [raw(table)[i if order is None else order[i]] for i in range(start, end)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("permuted", [False, True])
def test_rows_come_to_a_gpu_as_to_the_host(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, permuted: bool) -> None:
    monkeypatch.setattr(row_copies, "_PART_BYTES", 1000)
    table, order = table_of(3000, 16, dtype), torch.randperm(3000, generator=torch.manual_seed(0)) if permuted else None
    here, there = (torch.zeros(2500, 16, device=device).to(dtype) for device in ("cpu", "cuda:0"))
    with RowCopies() as copies:
        for to in (here, there):
            copies.add(table, order, 100, 2600, to)
        copies.wait()
    assert raw(there) == raw(here)


def test_several_parts_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)
    monkeypatch.setattr(row_copies, "_copy", lambda *_: both.wait())
    monkeypatch.setattr(row_copies, "_PART_BYTES", 4)
    with RowCopies() as copies:
        copies.add(table_of(2, 1), None, 0, 2, torch.zeros(2, 1))
        copies.wait()


def test_what_a_copy_raises_is_raised_where_it_is_waited_for_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done, go = [], threading.Event()

    def broken(source: np.ndarray, *_: object) -> None:
        if source[0, 0] == 0:
            raise OSError("the disk failed")
        assert go.wait(30)
        done.append(int(source[0, 0]))

    monkeypatch.setattr(row_copies, "_copy", broken)
    monkeypatch.setattr(row_copies, "_PART_BYTES", 1)
    rows = torch.arange(100, dtype=torch.uint8)[:, None]
    threading.Timer(0.2, go.set).start()
    with RowCopies() as copies:
        copies.add(rows, None, 0, 100, torch.zeros_like(rows))
        with pytest.raises(OSError, match="the disk failed"):
            copies.wait()
    assert len(done) < 99  # those that had not begun never will


def test_a_table_in_another_order_is_read_from_front_to_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(row_copies, "_read", lambda source: read.append(len(source)))
    table, order = table_of(64, 2), torch.arange(63, -1, -1)
    to = torch.zeros_like(table)
    with RowCopies() as copies:
        copies.add(table, order, 0, 1, to[:1])  # of so few rows the other pages are not read
        copies.wait()
        assert read == []
        copies.add(table, order, 1, 16, to[1:16])
        copies.add(table, order, 16, 64, to[16:])
        copies.add(table, None, 0, 64, torch.zeros_like(table))
        copies.wait()
    assert read == [64]
    assert raw(to) == raw(table)[::-1]
