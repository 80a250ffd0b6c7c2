"""A model's tables in memories of several kinds that one lookup reads: hot rows in a GPU's own, warm ones in that of all GPUs
of the host, a share each, cold ones in the host's. The host's memory holds the warm rows, too: no GPU is needed for them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.shards import Shards
from dpiframe_core.errors import InputError, Unavailable
from dpiframe_core.features.schema import FeatureSchema
from kernels.lookup.descriptors import Segment, descriptors, segment_descriptors
from kernels.runtime.host_memory import DeviceReadable, PrivateMemory, SharedMemory

log = logging.getLogger(__name__)
_LINE = 128  # bytes, to which tables begin aligned: what crosses the bus at once
_PART_BYTES = 64 << 20  # copied at once
Tables = Sequence[torch.Tensor]
Ranks = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where a model's rows are to lie.

    name: of its tables, one for each content: processes of one host share the rows in its memory by it. folder: for memory
    files, such as /dev/shm; None: this process keeps them for itself. ahead_bytes: of memory for rows that only files hold.
    """

    placement: Placement
    name: str
    folder: Path | None = Path("/dev/shm")
    ahead_bytes: int = 256 << 20


class Tiers:
    """Owns the rows as a placement has them, and the descriptors that lead to them.

    Args:
        tables: [rows, dim] on the host, in the schema's order; not needed any more afterwards.
        spares: of each table, slots in memory that the GPU reads for rows that only files hold; (), None: there are none.

    Attributes:
        descriptors: where the lookup finds rows. device_bytes, host_bytes: of tables.
        generation: of the descriptors that batches are to be of.

    Raises:
        InputError: the placement is of other tables.
        Unavailable: the host's memory does not hold the cold rows, or may not be locked.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        tables: Tables,
        scales: Sequence[torch.Tensor | None],
        home: Home,
        device: torch.device,
        spares: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self._spares = spares = spares or [None] * len(tables)
        placement, self._gpus = home.placement, home.placement.gpus
        places = _places(schema, placement)
        orders = [_order(placement, p) for p in places]
        rows = list(zip(places, tables, orders, strict=True))
        sizes = [_lines((p.held - p.hot) * t.shape[1] * t.element_size()) for p, t in zip(places, tables, strict=True)]
        self.host_bytes = sum(sizes)
        self._memory: SharedMemory | PrivateMemory = PrivateMemory(0)
        self._readable: DeviceReadable | None = None
        self._shards: Shards | None = None
        self.generation = 0
        try:
            begins = np.cumsum([0, *sizes[:-1]]).tolist()
            self._lock_memory(home)
            cold = [_rows_at(self._memory.bytes, at, p.held - p.hot, t) for at, (p, t, _) in zip(begins, rows, strict=True)]
            if self._memory.fresh:
                for (p, t, order), view in zip(rows, cold, strict=True):
                    _copy(t, order, p.hot, p.held, view)
                self._memory.publish()
            self._hot = [torch.empty(p.hot, t.shape[1], dtype=t.dtype, device=device) for p, t, _ in rows]
            for (p, t, order), hot in zip(rows, self._hot, strict=True):
                _copy(t, order, 0, p.hot, hot)
            self._scales = [None if s is None else s.to(device).contiguous() for s in scales]
            self._ranks = [
                _ranks_on(device, placement.ranks.get(p.table), p, 0 if spare is None else len(spare))
                for p, spare in zip(places, spares, strict=True)
            ]
            self._cold, self._all = cold, places
            if placement.gpus > 1 and home.folder is not None and any(p.warm > p.hot for p in places):
                warm = [rows[: p.warm - p.hot] for p, rows in zip(places, cold, strict=True)]
                self._shards = Shards(places, warm, placement.gpus, device, home.folder, f"{home.name}-{_digest(placement)}")
                self._shards.refresh()
            image = self._image()
            self.descriptors = descriptors((image, image), device)
        except BaseException:
            self.close()
            raise

    @property
    def device_bytes(self) -> int:
        own = sum(t.nbytes for t in (*self._hot, *self._scales, *self._ranks) if t is not None)
        return own + (self._shards.bytes_used if self._shards else 0)

    @property
    def shared(self) -> bool:
        """Whether other processes may come and go, whose rows are read."""
        return self._shards is not None

    @property
    def shares_missing(self) -> int:
        """Of the warm rows' shares, how many are read in the host's memory."""
        return self._shards.missing if self._shards else 0

    def refresh(self) -> bool:
        """Looks for processes that came or went. If some did, the other generation of descriptors leads to where rows lie now;
        after lookups are placed anew, it is to be the `generation`.
        """
        if self._shards is None or not self._shards.refresh():
            return False
        for memory, image in zip((self.descriptors.tables, self.descriptors.segments), self._image(), strict=True):
            half = len(image)
            memory[half * (1 - self.generation) :][:half].copy_(torch.from_numpy(image))
        return True

    def _image(self) -> tuple["np.ndarray", "np.ndarray"]:
        """One generation of descriptors, by what is reached now."""
        each = zip(self._all, self._hot, self._cold, range(len(self._all)), strict=True)
        segments = [self._segments(p, hot, cold, i) for p, hot, cold, i in each]
        return segment_descriptors(segments, _addresses(self._scales), _addresses(self._ranks))

    def _segments(self, p: TablePlacement, hot: torch.Tensor, cold: torch.Tensor, table: int) -> list[Segment]:
        """A table's; as many whoever is there."""
        found = [Segment(hot.data_ptr(), p.hot)] if p.hot else []
        share, row, warm_end = p.share(self._gpus), cold.shape[1] * cold.element_size(), p.hot
        if self._shards is not None:
            for part in range(self._gpus):
                begin, end = p.hot + part * share, min(p.hot + (part + 1) * share, p.warm)
                if begin < end:
                    at = self._shards.base(table, part)
                    found.append(Segment(cold.data_ptr() + (begin - p.hot) * row if at is None else at, end))
                    warm_end = end
        if warm_end < p.held:
            found.append(Segment(cold.data_ptr() + (warm_end - p.hot) * row, p.held))
        spare = self._spares[table]
        if spare is not None:
            # No id leads to the ranks that files hold: `RowsAhead` has put that of a slot in its place.
            found += [Segment(spare.data_ptr(), p.rows)] if p.in_files else []
            found.append(Segment(spare.data_ptr(), p.rows + len(spare)))
        return found

    def _lock_memory(self, home: Home) -> None:
        """`host_bytes` that the GPU reads: of all processes of this host, or of this one if the folder has no such memory."""
        if not self.host_bytes:
            return
        if home.folder is not None:
            try:
                self._memory = SharedMemory.claim(home.folder, f"{home.name}-{_digest(home.placement)}", self.host_bytes)
                self._readable = DeviceReadable(self._memory.bytes)
            except (OSError, RuntimeError) as e:
                log.warning("%s: %s: this process keeps %.1f GiB of rows for itself", home.folder, e, self.host_bytes / 2**30)
                self._memory.close()
            else:
                return
        try:
            self._memory = PrivateMemory(self.host_bytes)
            self._readable = DeviceReadable(self._memory.bytes)
        except (OSError, MemoryError, RuntimeError) as e:
            raise Unavailable(f"host tables: got {e}, expected memory for {self.host_bytes / 2**30:.1f} GiB of rows") from e

    def close(self) -> None:
        """Gives the host's memory back. No lookup may run any more."""
        if self._shards is not None:
            self._shards.close()
        if self._readable is not None:
            self._readable.close()
            self._readable = None
        self._memory.close()


def _places(schema: FeatureSchema, placement: Placement) -> list[TablePlacement]:
    placement.check(schema)
    return list(placement.tables)


def _rows_at(memory: torch.Tensor, begin: int, rows: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, dim] of a table, in the memory."""
    return memory[begin : begin + rows * like.shape[1] * like.element_size()].view(like.dtype).view(rows, like.shape[1])


def _order(placement: Placement, p: TablePlacement) -> torch.Tensor | None:
    """int64[rows]: the row at each rank; None: they lie in order of ids."""
    ranks = placement.ranks.get(p.table)
    if ranks is None:
        return None
    order = np.full(p.rows, -1, np.int64)
    if ranks.shape != (p.rows,) or int(ranks.max()) >= p.rows:
        raise InputError(f"placement: ranks of {p.table}", (ranks.shape, int(ranks.max())), f"an order of {p.rows} rows")
    order[ranks] = np.arange(p.rows)
    if order.min() < 0:
        raise InputError(f"placement: ranks of {p.table}", "a rank twice", f"each of {p.rows} once")
    return torch.from_numpy(order)


def _copy(table: torch.Tensor, order: torch.Tensor | None, start: int, end: int, to: torch.Tensor) -> None:
    """The rows of ranks [start, end), a part at a time."""
    step = max(1, _PART_BYTES // (table.shape[1] * table.element_size()))
    for a in range(start, end, step):
        b = min(end, a + step)
        to[a - start : b - start].copy_(table[a:b] if order is None else table[order[a:b]])


def _ranks_on(device: torch.device, ranks: Ranks | None, p: TablePlacement, slots: int) -> torch.Tensor | None:
    """The rank of each row and, behind them, of each slot."""
    if ranks is None:
        return None
    held = np.where(ranks < p.held, ranks, 0) if p.in_files else ranks
    every = np.concatenate([held, np.arange(p.rows, p.rows + slots)]) if slots else held
    return torch.from_numpy(np.ascontiguousarray(every, np.uint32).view(np.int32)).to(device)


def _digest(placement: Placement) -> str:
    found = sha256(repr(placement.tables).encode())
    for table in sorted(placement.ranks):
        found.update(placement.ranks[table].tobytes())
    return found.hexdigest()[:16]


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE
