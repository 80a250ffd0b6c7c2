"""Tables that are joined in temporary files."""

import errno

import pytest
import torch

from dpiframe_core.errors import InputError
from dpiframe_core.importers import mapped_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("piece", [1, 40, 1 << 22])
def test_rows_are_those_of_the_parts_in_order(monkeypatch, dtype, piece):
    monkeypatch.setattr(mapped_rows, "_PIECE", piece)
    table = torch.arange(33).view(11, 3).to(dtype)
    parts = [torch.zeros_like(table[:1]), table[1:], table[:0], table[:1], table.T.contiguous().T[4:6]]
    joined = mapped_rows.mapped_rows(iter(parts))
    assert joined.dtype == dtype
    torch.testing.assert_close(joined, torch.cat(parts), rtol=0, atol=0)


def test_a_full_disk_is_told_with_where_to_look(monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped_rows, "TemporaryFile", full)
    with pytest.raises(InputError, match=r"temporary files \(.*\): got 'No space left on device', .*TMPDIR"):
        mapped_rows.mapped_rows([torch.zeros(2, 2)])
