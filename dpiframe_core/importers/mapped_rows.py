"""Tables that are made of others, in temporary files that are mapped: an import has no memory to spare for a copy."""

from collections.abc import Iterable
from mmap import ACCESS_COPY, mmap
from tempfile import TemporaryFile, gettempdir

import torch
from torch import Tensor

from dpiframe_core.errors import InputError

_PIECE = 1 << 22  # bytes


def mapped_rows(parts: Iterable[Tensor]) -> Tensor:
    """The rows of all parts, one after the other, on the CPU. Parts are alike but for how many rows they have.

    Raises:
        InputError: there is no room for the file, which is as large as they are.
    """
    rows = 0
    try:
        with TemporaryFile() as file:
            for part in parts:
                for piece in torch.split(part.detach().cpu(), max(1, _PIECE * len(part) // max(1, part.nbytes))):
                    file.write(piece.contiguous().view(torch.uint8).numpy().data)
                rows += len(part)
            file.flush()
            # A private mapping, as what torch takes may be written to; nothing does.
            whole = torch.frombuffer(mmap(file.fileno(), 0, access=ACCESS_COPY), dtype=part.dtype)
    except OSError as e:
        expected = "room for a table; TMPDIR names another folder"
        raise InputError(f"temporary files ({gettempdir()})", e.strerror or str(e), expected) from e
    return whole.view(rows, *part.shape[1:])
