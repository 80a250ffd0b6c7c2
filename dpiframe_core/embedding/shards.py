"""Warm rows, of which each GPU of a host holds a share that all others read in place.

A process takes a slot (`shard_slots`), fills the slot's share from the host's memory, and maps the shares of the others. A
share that nobody holds is read from the host's memory, where all its rows are. A table's warm rows are cut into as many parts
as there are slots, by rank; the first part, which is read most, lies in another slot from table to table.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dpiframe_core.embedding.placement import TablePlacement
from dpiframe_core.embedding.shard_slots import ShardSlot, published, slot_paths
from kernels.runtime.device_memory import ExportedMemory, MappedMemory

log = logging.getLogger(__name__)
GRACE_S = 5.0  # for which memory stays mapped that lookups are told to read no more: a batch takes milliseconds


class Shards:
    """This process's share, and the others' that are there. `refresh` looks for those that came, went or were replaced.

    Args:
        warm: [warm rows, dim] of each table, in the host's memory, in the order of ranks.

    Attributes:
        bases: of each slot, the device address of its share; None: nobody holds it, or this device does not reach it.
        starts: of each table, where its rows begin in a share. bytes_used: of this process's share.
    """

    def __init__(
        self,
        places: Sequence[TablePlacement],
        warm: Sequence[torch.Tensor],
        gpus: int,
        device: torch.device,
        folder: Path,
        name: str,
    ) -> None:
        self._places, self._warm, self._gpus, self._device = places, warm, gpus, device
        self._folder, self._name = folder, name
        self._paths = slot_paths(folder, name, gpus)
        row_bytes = [t.shape[1] * t.element_size() for t in warm]
        sizes = [-(-p.share(gpus) * size // 128) * 128 for p, size in zip(places, row_bytes, strict=True)]
        self.starts: list[int] = np.cumsum([0, *sizes[:-1]]).tolist()
        self._bytes = sum(sizes)
        self.bases: list[int | None] = [None] * gpus
        self._slot: ShardSlot | None = None
        self._own: ExportedMemory | None = None
        self._mapped: dict[int, tuple[str, MappedMemory | None]] = {}
        self._retired: list[tuple[float, MappedMemory]] = []

    @property
    def bytes_used(self) -> int:
        return self._bytes if self._own is not None else 0

    @property
    def missing(self) -> int:
        """How many are read in the host's memory: nobody holds them, or this device does not reach who does."""
        return self.bases.count(None)

    def base(self, table: int, part: int) -> int | None:
        """Where a part of a table's warm rows begins; None: in the host's memory."""
        base = self.bases[(part + table) % self._gpus]
        return None if base is None else base + self.starts[table]

    def refresh(self) -> bool:
        """Whether `bases` are others now."""
        before = list(self.bases)
        if self._slot is None:
            self._take_slot()
        own = None if self._slot is None else self._slot.index
        for i, found in enumerate(published(self._paths, own)):
            token, memory = self._mapped.get(i, ("", None))
            if i == own or (found is not None and found[0] == token):
                continue
            if memory is not None:
                self._retired.append((time.monotonic() + GRACE_S, memory))
            self._mapped.pop(i, None)
            self.bases[i] = None
            if found is not None:
                self._mapped[i] = found[0], self._map(i, found[1])
        while self._retired and self._retired[0][0] < time.monotonic():
            self._retired.pop(0)[1].close()
        return self.bases != before

    def close(self) -> None:
        """No lookup may run any more."""
        for memory in (*(m for _, m in self._retired), *(m for _, m in self._mapped.values())):
            if memory is not None:
                memory.close()
        self._retired, self._mapped, self.bases = [], {}, [None] * self._gpus
        if self._slot is not None:
            self._slot.close()
        if self._own is not None:
            self._own.close()
        self._slot = self._own = None

    def _take_slot(self) -> None:
        slot = ShardSlot.claim(self._folder, self._name, self._gpus)
        if slot is None:
            return
        try:
            own = ExportedMemory(self._bytes, self._device)
            for table, (p, rows, start) in enumerate(zip(self._places, self._warm, self.starts, strict=True)):
                share, number = p.share(self._gpus), (slot.index - table) % self._gpus
                part = rows[number * share : min((number + 1) * share, p.warm - p.hot)]
                if len(part):
                    own.bytes[start : start + part.nbytes].copy_(part.contiguous().view(-1).view(torch.uint8))
            torch.cuda.synchronize(self._device)
        except BaseException:
            slot.close()
            raise
        slot.publish(own.handle)
        self._slot, self._own, self.bases[slot.index] = slot, own, own.address

    def _map(self, index: int, handle: bytes) -> MappedMemory | None:
        try:
            memory = MappedMemory(handle, self._device)
        except RuntimeError as e:
            log.warning("shard %d of %s is read from host memory: %s", index, self._name, e)
            return None
        self.bases[index] = memory.address
        return memory
