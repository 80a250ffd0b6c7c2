"""A model's tables in memories of several kinds that one lookup reads: hot rows in a GPU's own, warm ones in that of all GPUs
of the host, a share each, cold ones in the host's. The host's memory holds the warm rows, too: no GPU is needed for them. Where
rows move it holds the hot ones as well: which are hot is then each GPU's own affair.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.hot_rows import HotRows, Ints, Move, shared_slots
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.shards import Shards
from dpiframe_core.errors import InputError
from dpiframe_core.far_rows.host_rows import HostRows, RowSpan
from dpiframe_core.far_rows.row_copies import RowCopies
from dpiframe_core.features.schema import FeatureSchema
from kernels.lookup.descriptors import Segment, descriptors, segment_descriptors

Tables = Sequence[torch.Tensor]
Ranks = npt.NDArray[np.uint32]


class Tiers:
    """Owns the rows as a placement has them, and the descriptors that lead to them.

    Args:
        tables: [rows, dim] on the host, in the schema's order; not needed any more afterwards.
        spares: of each table, slots in memory that the GPU reads for rows that only files hold; (), None: there are none.

    Attributes:
        descriptors: where the lookup finds rows. device_bytes, host_bytes: of tables.
        generation: of the descriptors that batches are to be of. No batch reads the other one, but while it changes.
        moving: of each table, its hot rows, if they may be others; None: they stay.

    Raises:
        InputError: the placement is of other tables.
        Unavailable: as `HostRows`.
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
        slots = [0 if spare is None else len(spare) for spare in spares]
        moves = [home.replan_s is not None and HotRows.move(p, n) for p, n in zip(places, slots, strict=True)]
        self._firsts = firsts = [0 if may else p.hot for p, may in zip(places, moves, strict=True)]
        spans = [RowSpan(t, order, first, p.held) for first, (p, t, order) in zip(firsts, rows, strict=True)]
        name = "" if home.folder is None else f"{home.name}-{_digest(placement)}"  # looks at every rank
        self._host: HostRows | None = None
        self._shards: Shards | None = None
        self.generation = 0
        try:
            pools = shared_slots(places, tables, slots, moves, device)
            self._hot = [
                torch.empty(p.hot, t.shape[1], dtype=t.dtype, device=device)
                if pool is None
                else pool.memory[slice(*pool.own[i])]
                for i, (p, t, pool) in enumerate(zip(places, tables, pools, strict=True))
            ]
            with RowCopies() as copies:
                for (p, t, order), hot in zip(rows, self._hot, strict=True):
                    copies.add(t, order, 0, p.hot, hot)
                self._host = HostRows(spans, home.folder, name, copies)
                copies.wait()
            self.host_bytes, cold = self._host.nbytes, self._host.tables
            self._scales = [None if s is None else s.to(device).contiguous() for s in scales]
            self._ranks = [
                None if may else _ranks_on(device, placement.ranks.get(p.table), p, n)
                for p, n, may in zip(places, slots, moves, strict=True)
            ]
            self._own_ranks = [placement.ranks.get(p.table) for p in places]
            self.moving = [
                None if pool is None else HotRows(i, p, ranks, n, pool, view)
                for i, (p, ranks, n, pool, view) in enumerate(zip(places, self._own_ranks, slots, pools, cold, strict=True))
            ]
            self._cold, self._all = cold, places
            if placement.gpus > 1 and home.folder is not None and any(p.warm > p.hot for p in places):
                warm = [own[p.hot - first : p.warm - first] for p, first, own in zip(places, firsts, cold, strict=True)]
                self._shards = Shards(places, warm, placement.gpus, device, home.folder, name)
                self._shards.refresh()
            far = placement.host_bytes(schema), placement.cold_reads
            self.descriptors = descriptors([self._image(i) for i in range(2)], device, *far)
        except BaseException:
            self.close()
            raise

    @property
    def device_bytes(self) -> int:
        own = sum(t.nbytes for t in (*self._hot, *self._scales, *self._ranks) if t is not None)
        places = sum(2 * moving.places[0].nbytes for moving in self.moving if moving is not None)
        return own + places + (self._shards.bytes_used if self._shards else 0)

    @property
    def shared(self) -> bool:
        """Whether other processes may come and go, whose rows are read."""
        return self._shards is not None

    @property
    def shares_missing(self) -> int:
        """Of the warm rows' shares, how many are read in the host's memory."""
        return self._shards.missing if self._shards else 0

    @property
    def moves(self) -> bool:
        """Whether hot rows may be others."""
        return any(moving is not None for moving in self.moving)

    def refresh(self, place: Callable[[], None], over: Callable[[], None]) -> bool:
        """Whether processes came or went. Batches of the `generation` to come read rows where they lie now.

        place: has all lookups place themselves anew, for both generations. over: see `move`.
        """
        if self._shards is None or not self._shards.refresh():
            return False
        other = 1 - self.generation
        for memory, image in zip((self.descriptors.tables, self.descriptors.segments), self._image(other), strict=True):
            half = len(image)
            memory[half * other :][:half].copy_(torch.from_numpy(image))
        place()
        self._turn(over)
        return True

    def move(self, moves: Sequence[Move], over: Callable[[], None]) -> int:
        """Has rows come into the GPU's memory in the place of others; how many. Lookups go on meanwhile.

        over: returns when all batches are done that have begun; what it raises ends the change, and every row is found.
        """
        for move in moves:
            slots = self._moving(move.table).slots
            owners = slots.tables[move.slots]
            for table in np.unique(owners[owners >= 0]).tolist():
                self._moving(table).leave(slots.rows[move.slots[owners == table]])
        self._turn(over)
        for move in moves:
            self._moving(move.table).arrive(move.rows, move.slots, move.values)
        self._turn(over)
        return sum(len(move.rows) for move in moves)

    def tiers_of(self, table: int, ids: Ints) -> npt.NDArray[np.intp]:
        """Where each row is read: 0 this GPU's memory, 1 that of the host's GPUs, 2 the host's, 3 that for rows of files."""
        p, moving, ranks = self._all[table], self.moving[table], self._own_ranks[table]
        found = p.tiers(ids if ranks is None else ranks[ids])
        return found if moving is None else np.where(moving.slot_of(ids) >= 0, 0, np.where(found == 0, 2, found))

    def _turn(self, over: Callable[[], None]) -> None:
        """To the other generation, which is made to tell where rows lie now; returns when no batch reads the former one."""
        other = 1 - self.generation
        for moving in self.moving:
            if moving is not None:
                moving.catch_up(other)
        if self.descriptors.tables.is_cuda:
            torch.cuda.current_stream(self.descriptors.tables.device).synchronize()
        self.generation = other
        over()

    def _moving(self, table: int) -> HotRows:
        found = self.moving[table]
        if found is None:
            raise InputError("move.table", table, "one whose rows may move")
        return found

    def _image(self, generation: int) -> tuple["np.ndarray", "np.ndarray"]:
        """A generation of descriptors, by what is reached now."""
        each = zip(self._all, self._hot, self._cold, range(len(self._all)), strict=True)
        segments = [self._segments(p, hot, cold, i) for p, hot, cold, i in each]
        ranks = [own if m is None else m.places[generation] for own, m in zip(self._ranks, self.moving, strict=True)]
        rows = [s[-1].end if m is None else m.end - p.hot for s, m, p in zip(segments, self.moving, self._all, strict=True)]
        return segment_descriptors(segments, _addresses(self._scales), _addresses(ranks), rows)

    def _segments(self, p: TablePlacement, hot: torch.Tensor, cold: torch.Tensor, table: int) -> list[Segment]:
        """A table's; as many whoever is there."""
        found = [Segment(hot.data_ptr(), p.hot)] if p.hot else []
        share, row, warm_end, first = p.share(self._gpus), cold.shape[1] * cold.element_size(), p.hot, self._firsts[table]
        if self._shards is not None:
            for part in range(self._gpus):
                begin, end = p.hot + part * share, min(p.hot + (part + 1) * share, p.warm)
                if begin < end:
                    at = self._shards.base(table, part)
                    found.append(Segment(cold.data_ptr() + (begin - first) * row if at is None else at, end))
                    warm_end = end
        if warm_end < p.held:
            found.append(Segment(cold.data_ptr() + (warm_end - first) * row, p.held))
        spare = self._spares[table]
        if spare is not None:
            # No id leads to the ranks that files hold: `RowsAhead` has put that of a slot in its place.
            found += [Segment(spare.data_ptr(), p.rows)] if p.in_files else []
            found.append(Segment(spare.data_ptr(), p.rows + len(spare)))
        moving = self.moving[table]
        if moving is not None:
            found.append(Segment(cold.data_ptr(), moving.end))  # no id leads there, but places of rows that were hot at first
            if len(moving.slots.rows) > p.hot:
                found.append(Segment(moving.slots.memory.data_ptr(), moving.last))  # nor there, but those in others' slots
        return found

    def close(self) -> None:
        """Gives the host's memory back. No lookup may run any more."""
        if self._shards is not None:
            self._shards.close()
        if self._host is not None:
            self._host.close()


def _places(schema: FeatureSchema, placement: Placement) -> list[TablePlacement]:
    placement.check(schema)
    return list(placement.tables)


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
