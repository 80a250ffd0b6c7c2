"""The fused multi-table lookup on a GPU (embedding.cu): its device-side plan and the typed launch. See `reference.lookup`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.launch import check_rows, launch, type_name
from kernels.lookup_plan import ALWAYS_ROW_0, Batch, Kind, LookupPlan, Slot
from kernels.source import kernel

_SHARED_LIMIT = 46 * 1024
_MAX_ROWS = 8  # rows of a block; MAX_ROWS of embedding.cu
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_TABLE = np.dtype([("base", "<u8"), ("end", "<i8"), ("rows", "<i8"), ("next", "<i4"), ("segments", "<i4")])
_SEGMENT = np.dtype([("base", "<u8"), ("end", "<i8")])
_COLUMN = np.dtype([("table", "<i4"), ("position", "<i4"), ("row_bytes", "<i4"), ("may_pad", "<i4"), ("oov", "<i8")])
_UNIT = np.dtype(
    [
        ("first", "<u2"),
        ("columns", "<u2"),
        ("element", "<u2"),
        ("width", "u1"),
        ("how", "u1"),
        ("out", "<i4"),
        ("number", "<i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [end of the segment before, end) of a table, consecutive from the device-readable address `base`."""

    base: int
    end: int


def segment_descriptors(tables: Sequence[Sequence[Segment]]) -> tuple[np.ndarray, np.ndarray]:
    """The byte images (uint8) of one generation: a record a table with its first segment inline, and the list of all segments.

    Raises:
        ValueError: a table has no segment, or its segments are not ascending.
    """
    ends = [[s.end for s in t] for t in tables]
    for i, e in enumerate(ends):
        if not e or e != sorted(set(e)) or e[0] < 1:
            raise ValueError(f"table {i}: got segment ends {e}, expected at least one, ascending from 1")
    firsts = np.cumsum([0, *(len(e) for e in ends)])
    records = [(t[0].base, t[0].end, t[-1].end, first + 1, len(t)) for t, first in zip(tables, firsts, strict=False)]
    listed = [(s.base, s.end) for t in tables for s in t]
    return np.array(records, _TABLE).view(np.uint8), np.array(listed, _SEGMENT).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Device memory with two generations of segment descriptors, one after the other; a lane's state[1] picks one.

    tables: uint8[2 * n_tables * 32]; segments: uint8[2 * n_segments * 16]; out_of_range: int64[1], ids refused so far.
    """

    tables: torch.Tensor
    segments: torch.Tensor
    n_tables: int
    n_segments: int
    out_of_range: torch.Tensor


class DeviceLookup:
    """A `LookupPlan` compiled for one GPU. Owns its static arrays (some kB), which every lane and bucket shares.

    Args:
        out_dtype: float32 or bfloat16, of x. id_dtype: int32 or int64, of the batches' ids.

    Raises:
        ValueError: a row has more ids and numbers than shared memory holds.
    """

    def __init__(self, plan: LookupPlan, out_dtype: torch.dtype, id_dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self._out_dtype = out_dtype
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        users, constants = _users(plan)
        units = [u for s in plan.x_slots for u in _units(plan, s)]
        totals = [u for s in plan.total_slots for u in _units(plan, s)]
        self._users = _to_device(np.array([*(c for pair in users for c in pair), *constants], _COLUMN), device)
        self._units = _to_device(np.array([*units, *totals], _UNIT), device)
        ids, numbers = len(users), plan.context_numbers + plan.candidate_numbers
        self.threads = _threads(len(units))
        self._shared_per_row = len(plan.columns) * 8 + ids * id_dtype.itemsize + numbers * 4
        if self._shared_per_row > _SHARED_LIMIT:
            raise ValueError(f"lookup: got {self._shared_per_row} bytes of ids and numbers a row, expected <= {_SHARED_LIMIT}")
        sizes = {
            "THREADS": self.threads, "CONTEXT_IDS": plan.context_width, "CANDIDATE_IDS": plan.candidate_width,
            "CONTEXT_NUMBERS": plan.context_numbers, "CANDIDATE_NUMBERS": plan.candidate_numbers,
            "USERS": len(users[0]) if users else 1, "COLUMNS": len(plan.columns), "CONSTANTS": len(constants),
            "UNITS": len(units), "TOTALS": len(totals),
        }  # fmt: skip
        types = {"ID": "int" if id_dtype == torch.int32 else "long long", "OUT": type_name(out_dtype)}
        constants_of_kernel = types | {k: str(v) for k, v in sizes.items()}
        self._kernel = kernel("embedding", "lookup", constants_of_kernel, device.index or 0)

    def rows_per_block(self, rows: int) -> int:
        """Few enough that the grid fills the GPU (2 blocks a multiprocessor), many enough to share a block's fixed work."""
        return max(1, min(_MAX_ROWS, -(-rows // (2 * self._processors)), _SHARED_LIMIT // max(1, self._shared_per_row)))

    def __call__(
        self,
        batch: Batch,
        rows: int,
        descriptors: Descriptors,
        x: torch.Tensor | None,
        total: torch.Tensor | None,
        state: torch.Tensor,
    ) -> None:
        """Writes x[:n, :x_width] and total[:n, 0] for the batch's n <= rows true rows, and n to state[0].

        Args:
            batch: pinned host tensors (or device ones).
            rows: rows of the launch grid: the bucket.
            x: OUT[>= rows, >= x_width], row starts 16-byte aligned; None only if the plan has no x slots.
            total: float32[>= rows, 1]; None only if the plan has no first-order terms.
            state: int32[2] on the device: [0] for the kernels that follow, [1] the generation of descriptors to read.

        Raises:
            ValueError: an operand does not fit the plan.
        """
        p = self.plan
        for name, tensor, width in (
            ("context ids", batch.context_ids, p.context_width),
            ("context numbers", batch.context_numbers, p.context_numbers),
            ("candidate ids", batch.candidate_ids, p.candidate_width),
            ("candidate numbers", batch.candidate_numbers, p.candidate_numbers),
        ):
            if tensor.dim() != 2 or tensor.shape[1] != width or not tensor.is_contiguous():
                raise ValueError(f"lookup {name}: got shape {tuple(tensor.shape)}, expected contiguous [*, {width}]")
        if p.x_slots:
            if x is None or x.dtype != self._out_dtype or (x.stride(0) * x.element_size()) % 16 != 0:
                raise ValueError(f"lookup x: got {x if x is None else (x.dtype, x.stride())}, expected 16-byte aligned rows")
            check_rows("lookup x", x, rows, p.x_width)
        if p.total_slots:
            if total is None or total.dtype != torch.float32 or total.stride(0) != 1:
                raise ValueError("lookup total: got none or a wrong layout, expected float32[B, 1]")
            check_rows("lookup total", total, rows, 1)
        r = self.rows_per_block(rows)
        i32 = np.int32
        launch(
            self._kernel,
            -(-rows // r),
            self.threads,
            (
                batch.header.data_ptr(), batch.request_of_row.data_ptr(),
                batch.context_ids.data_ptr(), batch.candidate_ids.data_ptr(),
                batch.context_numbers.data_ptr(), batch.candidate_numbers.data_ptr(),
                descriptors.tables.data_ptr(), descriptors.segments.data_ptr(),
                i32(descriptors.n_tables), i32(descriptors.n_segments),
                self._users.data_ptr(), self._units.data_ptr(),
                0 if x is None else x.data_ptr(), i32(0 if x is None else x.stride(0)),
                0 if total is None else total.data_ptr(),
                descriptors.out_of_range.data_ptr(), state.data_ptr(), i32(rows), i32(r),
            ),
            shared_bytes=r * self._shared_per_row,
        )  # fmt: skip


def _users(plan: LookupPlan) -> tuple[list[list[tuple[int, ...]]], list[tuple[int, ...]]]:
    """For each id of a row (context ids first) the columns it feeds, padded to one length; and the columns without an id."""
    fed: list[list[tuple[int, ...]]] = [[] for _ in range(plan.context_width + plan.candidate_width)]
    constants: list[tuple[int, ...]] = []
    for position, c in enumerate(plan.columns):
        shape = plan.tables[c.table]
        record = (c.table, position, shape.dim * shape.dtype.itemsize, int(c.may_pad), c.oov)
        if c.source == ALWAYS_ROW_0:
            constants.append(record)
        else:
            fed[plan.context_width + c.source if c.source >= 0 else -1 - c.source].append(record)
    most = max((len(users) for users in fed), default=0) or 1
    none = (0, -1, 0, 0, 0)
    return [users + [none] * (most - len(users)) for users in fed], constants


def _units(plan: LookupPlan, slot: Slot) -> list[tuple[int, ...]]:
    """The output vectors of a slot: 4 columns wide where table rows and output columns stay aligned, else 1."""
    width = 4 if slot.dim % 4 == 0 and slot.out % 4 == 0 else 1
    dtype = 0 if slot.kind == Kind.COPY else _DTYPES[plan.tables[plan.columns[slot.first].table].dtype]
    how = slot.kind | dtype << 2 | slot.mean << 4
    number = 0
    if slot.kind != Kind.GATHER:  # in shared memory context numbers come first
        number = slot.number + plan.context_numbers if slot.number >= 0 else -1 - slot.number
    return [(slot.first, slot.columns, e, width, how, slot.out + e, number) for e in range(0, slot.dim, width)]


def _threads(units: int) -> int:
    """A thread a unit, or several rows' units side by side where units are few; whole warps, 128 to 512."""
    if units <= 256:
        return -(-max(128, max(1, 256 // max(1, units)) * units) // 32) * 32
    return -(-units // -(-units // 512) // 32) * 32


def _to_device(records: np.ndarray, device: torch.device) -> torch.Tensor:
    image = np.ascontiguousarray(records).view(np.uint8).reshape(-1)
    return torch.from_numpy(image.copy() if image.size else np.zeros(32, np.uint8)).to(device)
