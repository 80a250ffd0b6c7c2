"""Whether a device's memory holds one more model, before anything is put there: another one serves from it meanwhile."""

import torch

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.errors import Unavailable


def require_room(bundle: Bundle, device: str, working_bytes: int, hot_bytes: int | None = None) -> None:
    """Counts tables and weights; buffers and graphs are taken to be as large as those of the models before.

    Args:
        working_bytes: of those. hot_bytes: what the tables may take of the device, if that does not hold them whole.

    Raises:
        Unavailable: it does not.
    """
    target = torch.device(device)
    if target.type != "cuda":
        return
    tables = sum(t.nbytes for t in bundle.tables.values())
    needed = (tables if hot_bytes is None else min(tables, hot_bytes)) + sum(t.nbytes for t in bundle.dense.values())
    needed += working_bytes
    # What torch holds of models before it gives to the next one.
    free = torch.cuda.mem_get_info(target)[0] + torch.cuda.memory_reserved(target) - torch.cuda.memory_allocated(target)
    if free < needed:
        rule = "unload a version that gets no requests, or have tables lie in host memory (`tables`)"
        raise Unavailable(f"{bundle.path}: got {free:,} bytes free on {target}, expected the {needed:,} it needs: {rule}")
