"""The fused multi-table lookup on a GPU (embedding.cu): its device-side plan and the typed launch. See `reference.lookup`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.lookup.bag_parts import FAR, FARTHER, LONG, BagParts, Rows, bag_parts, rows_of
from kernels.lookup.descriptors import REACH, TABLE, Descriptors
from kernels.lookup.id_record import carried_bytes
from kernels.lookup.plan import Batch, Kind, LookupPlan
from kernels.lookup.tiling import (
    HistoryPart,
    Tiling,
    bag_tiling,
    far_tiling,
    history_blocks,
    history_parts,
    history_tiling,
    most_words,
    tiling,
)
from kernels.lookup.units import dtype_set, is_once, placed, units_image, units_of
from kernels.runtime.launch import check_rows, launch, type_name
from kernels.runtime.source import KernelSource, loaded
from kernels.runtime.state import STATE_WORDS

_SHARED_LIMIT = 46 * 1024
_TERM_BYTES = 36, 52  # a first-order term's in shared memory: embedding.cu's Source and a scale; in tiers


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """How bags are cut into parts, and the records of all units: as built, and on the device. Some kB."""

    bags: BagParts
    image: np.ndarray
    records: torch.Tensor


class DeviceLookup:
    """A `LookupPlan` compiled for one GPU, over the tables of `descriptors`. Owns its static arrays (some kB), which every lane
    and bucket shares.

    Args:
        out_dtype: float32, bfloat16 or float8_e4m3fn, of x. out_scale: of the latter: a value is what is written times it.
        once: columns of x, [first, end), whole slots of unpooled ids of a context and their masks, which are written but once a
            context, in the row of x that has its number. Ids outside their table are counted once there, too.
        shared: columns of x, [first, end), of a context's features, which are written for each context too: `shared_x` of a
            call. first and end are multiples of a unit's columns. Not with `once`.

    Raises:
        ValueError: a row has more ids, numbers and first-order terms than shared memory holds; some bags are too long for
            `shared`; or `once` has a pooled slot or a part of one.
    """

    def __init__(
        self,
        plan: LookupPlan,
        descriptors: Descriptors,
        out_dtype: torch.dtype,
        out_scale: float = 1.0,
        once: Sequence[tuple[int, int]] = (),
        shared: tuple[int, int] | None = None,
    ) -> None:
        self.plan, self.once, self.shared = plan, tuple(once), shared
        self._descriptors, self._out_dtype, self._device = descriptors, out_dtype, descriptors.tables.device
        self._processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        vector = _vector(plan, out_dtype)
        in_parts = descriptors.tiers and not (once or shared)
        most_ids = None if not in_parts else FAR if descriptors.spread <= REACH else FARTHER
        of_contexts = {s.out: s for s in plan.x_slots if is_once(s, self.once)}  # no two begin at one column
        each = replace(plan, x_slots=tuple(s for s in plan.x_slots if s.out not in of_contexts))
        self.bags, of_rows = bag_parts(each, vector, most_ids)
        if shared and (once or self.bags.parts):
            raise ValueError(f"lookup: got {len(self.bags.parts)} parts of bags, columns {once} once a context, expected none "
                             f"beside columns {shared} of each context")  # fmt: skip
        read, prefix = plan.context_end((*each.x_slots, *plan.total_slots)), plan.context_ids.prefix_bytes
        self._carried = carried_bytes(plan.context_ids, plan.context_numbers) if read <= prefix else 0
        self.carries = self._carried > 0  # whether it reads what rows carry of their contexts
        self._row_words = prefix // 4 if self._carried else -(-read // 4)
        units = [u for s in of_rows for u in units_of(plan, s, vector)]
        totals = [u for s in plan.total_slots for u in units_of(plan, s, 1)]
        once_units = [u for s in of_contexts.values() for u in units_of(plan, s, vector)]
        once_units.sort(key=lambda u: (u.id, u.out))
        self._once_ids = tuple((u.id, u.how.id_bytes) for u in once_units)
        self.units, self.totals = len(units), len(totals)
        self._candidate_bytes = plan.candidate_ids.nbytes, plan.candidate_numbers * 4
        cuts = {Rows.OTHER: self.bags}
        for of in (Rows.ALONE, Rows.SOME) if self.bags.parts else ():
            cut = bag_parts(each, vector, most_ids, of)[0]
            # Of tables in tiers records are larger; sums are to have the same bits there.
            if cut != self.bags and self._shared_bytes(1, cut, tiers=True) <= _SHARED_LIMIT:
                cuts[of] = cut
        self._cuts: dict[Rows, _Cut] = {}
        for of, bags in cuts.items():
            records = placed(units, once_units, [*totals, *bags.units], plan.context_ids.nbytes, 4 * self._row_words)
            image = units_image(records, bags.columns, descriptors.tiers)
            self._cuts[of] = _Cut(bags, image, torch.zeros(image.nbytes, dtype=torch.uint8, device=self._device))
        self.place()
        if (size := self._shared_bytes(1, self.bags)) > _SHARED_LIMIT:
            raise ValueError(f"lookup: got {size} bytes of terms, ids, numbers, expected <= {_SHARED_LIMIT}")
        self._most = max([1, *(s.columns for s in (*of_rows, *plan.total_slots))])
        self._constants = {
            "ID": "unsigned long long" if 8 in (*plan.context_ids.widths, *plan.candidate_ids.widths) else "unsigned",
            "OUT": type_name(out_dtype), "CONTEXT_BYTES": plan.context_ids.nbytes, "CANDIDATE_BYTES": plan.candidate_ids.nbytes,
            "CONTEXT_NUMBERS": plan.context_numbers, "CANDIDATE_NUMBERS": plan.candidate_numbers,
            "UNITS": len(units) + len(once_units), "TOTALS": len(totals), "VEC": vector,
            "NARROW": int(any(u.how.width < vector for u in (*units, *once_units))),
            "MASKS": int(any(s.kind == Kind.MASK for s in plan.x_slots)), "LARGEST": int(any(s.largest for s in plan.reads)),
            "DTYPES": dtype_set(plan, plan.x_slots), "TOTAL_DTYPES": dtype_set(plan, plan.total_slots),
            "OUT_FACTOR": f"{1 / out_scale!r}f", "TIERS": int(descriptors.tiers), "MOST": self._most, "FIRST_ONCE": len(units),
            "ROW_WORDS": self._row_words, "SHARED": f"{{{shared[0]},{shared[1]}}}" if shared else "{0,0}",
        }  # fmt: skip

    def place(self) -> None:
        """Takes over from the descriptors where tables lie. Again after they changed, before a batch is of that generation."""
        for cut in self._cuts.values():
            self._place(cut)

    def _place(self, cut: _Cut) -> None:
        (image,) = cut.image
        reads = np.flatnonzero(image["unit"]["row_bytes"])
        far = image["far"][reads]
        tables = self._descriptors.tables.cpu().numpy().view(TABLE).reshape(2, -1).T[far["table"]]  # [reads, 2]
        offset = far["offset"][:, None].astype(np.uint64)
        image["base"][reads] = tables["base"] + offset
        image["limit"][reads] = tables["rows" if self._descriptors.tiers else "end"]
        if self._descriptors.tiers:
            image["near"][reads], image["ranks"][reads] = tables["end"], tables["ranks"]
        image["scale"][reads] = np.where(tables["scale"] > 0, tables["scale"] + 4 * offset, 0)
        cut.records.copy_(torch.from_numpy(cut.image.view(np.uint8)))

    def _cut_for(self, rows: int) -> _Cut:
        """That of a launch."""
        return self._cuts.get(rows_of(rows, self._processors), self._cuts[Rows.OTHER])

    def tiling(self, rows: int, pinned: bool) -> Tiling:
        """How a launch for `rows` rows is cut, with no more rows a block than its shared memory and threads hold."""
        bags = self._cut_for(rows).bags
        if bags.units:
            t = bag_tiling(rows, self.units, self.totals, bags, self._processors, pinned, self._descriptors.tiers)
            if self._descriptors.spread > REACH:
                t = far_tiling(rows, t, bags.team, len(bags.parts), self._processors, self._descriptors.cold_reads)
        else:
            t = tiling(rows, max(self.units, bool(self.once)), self.totals, self._processors, pinned, self._most > 1)
            if self.once:
                t = history_tiling(rows, t, len(self._once_ids), self._processors)
        threads = t.unit_threads + t.total_threads  # one of them reads each row's request
        fitting = (r for r in range(min(t.rows, threads), 0, -1) if self._shared_bytes(r, bags) <= _SHARED_LIMIT)
        return replace(t, rows=next(fitting))

    def _shared_bytes(self, rows: int, bags: BagParts, tiers: bool | None = None) -> int:
        tiers = self._descriptors.tiers if tiers is None else tiers
        of_context = 0 if self._carried else 4 * (self._row_words + self.plan.context_numbers)
        own = self.totals * _TERM_BYTES[tiers] + 4 + rows * (8 + of_context)
        staged = sum(_lines(rows * size + 124) for size in (*self._candidate_bytes, self._carried))
        return _lines(own) + staged + bags.shared_bytes(rows, tiers)

    def _parts(self, t: Tiling) -> tuple[HistoryPart, ...]:
        return history_parts(self._once_ids, t.unit_threads + t.total_threads)

    def _source(self, t: Tiling, bags: BagParts, ahead: bool, carried: bool) -> KernelSource:
        parts = self._parts(t)
        sizes = {
            "CARRIED": int(carried), "HISTORY_PARTS": len(parts), "MOST_PART_WORDS": most_words(parts),
            "PARTS_OF_HISTORY": f"{{{','.join(f'{{{p.first},{p.end},{p.first_word},{p.end_word}}}' for p in parts)}}}",
            "PARTS": len(bags.parts), "SINGLES": len(bags.singles), "JOINS": len(bags.joins), "TEAM": bags.team,
            "UNIT_THREADS": t.unit_threads, "TOTAL_THREADS": t.total_threads, "GROUP": t.group,
            "BLOCKS": t.blocks, "FLIGHT": t.flight, "EVICT_FIRST": int(t.evict_first), "AHEAD": int(ahead),
        }  # fmt: skip
        constants = {k: str(v) for k, v in (self._constants | sizes).items()}
        return KernelSource.of("lookup/embedding", "lookup", constants, self._device.index)

    def source(self, rows: int, *, pinned: bool, ahead: bool = False) -> KernelSource:
        """What a launch for so many rows needs.

        Args:
            pinned: whether ids and numbers lie in host memory. ahead: whether it runs ahead of its rows.
        """
        return self._source(self.tiling(rows, pinned), self._cut_for(rows).bags, ahead, self.carries)

    def __call__(
        self,
        batch: Batch,
        rows: int,
        x: torch.Tensor | None,
        total: torch.Tensor | None,
        state: torch.Tensor,
        *,
        counts: bool = True,
        ahead: bool = False,
        context_rows: torch.Tensor | None = None,
        shared_x: torch.Tensor | None = None,
    ) -> None:
        """Writes x[:n, :x_width] and total[:n, 0] for the batch's n <= rows true rows, and n to state[TRUE_ROWS].

        Args:
            batch: pinned host tensors (or device ones).
            rows: rows of the launch grid: the bucket.
            x: OUT[>= rows, >= x_width], row starts 16-byte aligned; None only if the plan has no x slots. With `once`
                there is memory for a row of each context that `batch` has room for.
            total: float32[>= rows, 1]; None only if the plan has no first-order terms.
            state: int32[STATE_WORDS] on the device, see state.py.
            counts: False for a second lookup of one batch, which leaves the number alone.
            ahead: rows may still be staged after the launch, for as long as the header's STAGED_ROWS is negative. Only for the
                one lookup of a batch.
            context_rows: int32[>= rows] on the device, with `once` or `shared`: gets for each row its context.
            shared_x: [contexts, columns of `shared`], as x, without gaps: gets those of each context that it has room for.

        Raises:
            ValueError: an operand does not fit the plan.
        """
        p = self.plan
        for name, tensor, width, dtype in (
            ("context ids", batch.context_ids, p.context_ids.nbytes, torch.uint8),
            ("context numbers", batch.context_numbers, p.context_numbers, torch.float32),
            ("candidate ids", batch.candidate_ids, p.candidate_ids.nbytes, torch.uint8),
            ("candidate numbers", batch.candidate_numbers, p.candidate_numbers, torch.float32),
        ):
            if tensor.dim() != 2 or tensor.shape[1] != width or tensor.dtype != dtype or not tensor.is_contiguous():
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"lookup {name}: got {got}, expected contiguous {dtype} [*, {width}]")
        if p.x_slots:
            if x is None or x.dtype != self._out_dtype or (x.stride(0) * x.element_size()) % 16 != 0:
                raise ValueError(f"lookup x: got {x if x is None else (x.dtype, x.stride())}, expected 16-byte aligned rows")
            check_rows("lookup x", x, rows, p.x_width)
            held = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // x.stride(0)
            if self.once and held < (room := len(batch.context_ids)):
                raise ValueError(f"lookup x: got memory of {held} rows, expected one for each of {room} contexts")
        if p.total_slots:
            if total is None or total.dtype != torch.float32 or total.stride(0) != 1:
                raise ValueError("lookup total: got none or a wrong layout, expected float32[B, 1]")
            check_rows("lookup total", total, rows, 1)
        by_context = self.once or self.shared
        if by_context and (context_rows is None or context_rows.dtype != torch.int32 or len(context_rows) < rows):
            got = "None" if context_rows is None else f"{context_rows.dtype} {tuple(context_rows.shape)}"
            raise ValueError(f"lookup context rows: got {got}, expected int32[>= {rows}]")
        if self.shared:
            kind = dtype, width = self._out_dtype, self.shared[1] - self.shared[0]
            if shared_x is None or (shared_x.dtype, shared_x.shape[1]) != kind or not shared_x.is_contiguous():
                got = "None" if shared_x is None else f"{shared_x.dtype} {tuple(shared_x.shape)}"
                raise ValueError(f"lookup shared x: got {got}, expected contiguous {dtype} [contexts, {width}]")
        carried = batch.carried if self._carried else None
        if carried is not None and (carried.shape[1] != self._carried or not carried.is_contiguous() or len(carried) < rows):
            raise ValueError(f"lookup carried: got {tuple(carried.shape)}, expected contiguous [>= {rows}, {self._carried}]")
        if ahead and state.numel() < STATE_WORDS:
            got = f"{state.numel()} words"
            raise ValueError(f"lookup state: got {got}, expected {STATE_WORDS} for rows that are staged after the launch")
        descriptors, i32 = self._descriptors, np.int32
        t = self.tiling(rows, pinned=not (batch.candidate_ids.is_cuda or batch.context_ids.is_cuda))
        cut, parts = self._cut_for(rows), self._parts(t)
        histories = history_blocks(len(parts), rows, ahead)
        launch(
            loaded(self._source(t, cut.bags, ahead, carried is not None)),
            -(-rows // t.rows) + histories,
            t.unit_threads + t.total_threads,
            (
                batch.header.data_ptr(), batch.request_of_row.data_ptr(),
                batch.context_ids.data_ptr(), batch.candidate_ids.data_ptr(),
                batch.context_numbers.data_ptr(), batch.candidate_numbers.data_ptr(),
                0 if carried is None else carried.data_ptr(), i32(len(batch.context_ids)), i32(histories),
                descriptors.tables.data_ptr(), descriptors.segments.data_ptr(),
                i32(descriptors.n_tables), i32(descriptors.n_segments), cut.records.data_ptr(),
                0 if x is None else x.data_ptr(), i32(0 if x is None else x.stride(0)),
                0 if total is None else total.data_ptr(), descriptors.out_of_range.data_ptr(), state.data_ptr(),
                0 if context_rows is None else context_rows.data_ptr(), 0 if shared_x is None else shared_x.data_ptr(),
                i32(0 if shared_x is None else len(shared_x)), i32(rows), i32(t.rows), i32(counts),
            ),
            shared_bytes=max(self._shared_bytes(t.rows, cut.bags), bool(parts) * (16 + 32 * most_words(parts))),
        )  # fmt: skip


def _lines(size: int) -> int:
    return -(-size // 128) * 128


def _vector(plan: LookupPlan, out_dtype: torch.dtype) -> int:
    """Columns of a wide unit: 8 where that makes 16-byte stores and no load is wider, else 4. With long bags, whose reads count
    and not the stores, as many as make 16-byte loads.
    """
    wide = [s for s in plan.x_slots if s.dim % 4 == 0 and s.out % 4 == 0]
    most_bytes = max((plan.tables[plan.columns[s.first].table].dtype.itemsize for s in wide), default=1)
    most = 16 // most_bytes if any(s.columns > LONG for s in wide) else 8 if out_dtype.itemsize <= 2 and most_bytes <= 2 else 4
    return next(v for v in (16, 8, 4) if v <= most and all(s.dim % v == 0 and s.out % v == 0 for s in wide))
