"""Owns a model's embedding tables on one device, and tells lookups where the rows lie through segment descriptors.

A table's rows lie in one segment of the GPU's memory, or by a placement in several, some of the host's (`tiers`). Descriptors
are double-buffered and chosen by a word of each lane, so that new addresses take effect between two batches without a new
capture. A lookup keeps a copy of first segments: `DeviceLookup.place` renews it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.layout import table_dtype
from dpiframe_core.embedding.spares import Spares
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.errors import BundleError, Unavailable
from dpiframe_core.far_rows.row_copies import RowCopies
from dpiframe_core.far_rows.row_source import FileRows, RowSource
from dpiframe_core.far_rows.rows_ahead import RowsAhead
from dpiframe_core.features.schema import FeatureSchema
from kernels.lookup.descriptors import Descriptors, whole
from kernels.lookup.plan import LookupPlan

_LARGE = 1 << 24  # bytes: a smaller table is copied before threads have begun
_MOST_NEAR = 1 << 24  # rows of files in a GPU's memory at a time: the host has 20 bytes for each


class EmbeddingStore:
    """The tables of one model, in the schema's order.

    Args:
        tables: name -> [rows, dim] as the schema says (memory-mapped is fine).
        device: where they are to live. On a CPU they are used as they come.
        scales: name -> float32[dim], of the int8 tables.
        home: where rows lie if the device's memory is not to hold all of them; on a CPU: in the files that `tables` map.

    Attributes:
        tables, scales: in the schema's order; a scale is None where the table is not int8. () of a GPU's tables with a home.
        host_bytes: of rows that a GPU reads from the host's memory. mapped: whether a CPU is to read rows where they lie.
        ahead: reads rows that only files hold; None: there are none. spares: of each table, where it puts them.

    Raises:
        BundleError: a table is missing or differs from the schema.
        InputError, Unavailable: see `Tiers`.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        tables: Mapping[str, torch.Tensor],
        device: torch.device,
        scales: Mapping[str, torch.Tensor] | None = None,
        home: Home | None = None,
    ) -> None:
        given = [(scales or {}).get(t.name) for t in schema.tables]
        for t, scale in zip(schema.tables, given, strict=True):
            _check(f"tables.{t.name}", tables.get(t.name), (t.rows, t.dim), t.dtype)
            if t.dtype == "int8":
                _check(f"tables.{t.name}.scale", scale, (t.dim,), "float32")
        self.device, self.host_bytes = device, 0
        self.mapped = home is not None and device.type == "cpu"
        self._tiers: Tiers | None = None
        self._spares: Spares | None = None
        self.ahead: RowsAhead | None = None
        self.tables: list[torch.Tensor] = []
        self.scales: list[torch.Tensor | None] = []
        self.spares: list[torch.Tensor | None] = [None] * len(schema.tables)
        ordered = [tables[t.name] for t in schema.tables]
        files = FileRows(ordered)
        if home is not None:
            home.placement.check(schema)
            self._read_ahead(schema, ordered, home, home.source or files)
        if home is not None and device.type == "cuda":
            try:
                self._tiers = Tiers(schema, ordered, given, home, device, self.spares)
            except BaseException:
                self.close()
                raise
            self.descriptors: Descriptors | None = self._tiers.descriptors
            self.host_bytes = self._tiers.host_bytes
        else:
            self.tables = _whole(ordered, device)
            self.scales = [None if s is None else s.to(device).contiguous() for s in given]
            self.descriptors = whole(self.tables, self.scales, device) if device.type == "cuda" else None
        if home is not None and home.source is None:
            for i, rows in enumerate(self.spares):  # only now that the other rows were read, one behind the other
                if rows is not None:
                    files.advise(i)

    @property
    def bytes_used(self) -> int:
        """Of tables and scales in the device's memory."""
        own = sum(t.nbytes for t in (*self.tables, *self.scales) if t is not None)
        return own + (self._tiers.device_bytes if self._tiers else 0)

    @property
    def out_of_range(self) -> int:
        """Ids that lookups on a GPU found outside their table since the start. Waits for the device."""
        return int(self.descriptors.out_of_range.item()) if self.descriptors else 0

    @property
    def generation(self) -> int:
        """Of the descriptors that batches are to be of."""
        return self._tiers.generation if self._tiers else 0

    @property
    def shared(self) -> bool:
        """Whether rows lie on GPUs of other processes, which come and go: `refresh` looks for them."""
        return self._tiers is not None and self._tiers.shared

    @property
    def shares_missing(self) -> int:
        """Of the shares of rows that GPUs of this host hold, how many are read in the host's memory meanwhile."""
        return self._tiers.shares_missing if self._tiers else 0

    def refresh(self, place: Callable[[], None], over: Callable[[], None]) -> bool:
        """See `Tiers.refresh`."""
        return self._tiers is not None and self._tiers.refresh(place, over)

    @property
    def tiers(self) -> Tiers | None:
        """Where rows lie by a placement on a GPU."""
        return self._tiers

    def placed(self, plan: LookupPlan) -> LookupPlan:
        """A lookup's plan, in which unknown values read their rows where they lie."""
        ahead = self.ahead
        if ahead is None:
            return plan
        return replace(plan, columns=tuple(replace(c, oov=ahead.unknown(c.table, c.oov)) for c in plan.columns))

    def close(self) -> None:
        """Gives the host's memory back that a GPU reads. No lookup may run any more."""
        if self._tiers is not None:
            self._tiers.close()
        if self.ahead is not None:
            self.ahead.close()
        if self._spares is not None:
            self._spares.close()

    def _read_ahead(self, schema: FeatureSchema, tables: list[torch.Tensor], home: Home, source: RowSource) -> None:
        """Sets up what reads the rows that no memory holds, if there are any."""
        far = [i for i, p in enumerate(home.placement.tables) if p.in_files]
        if not far:
            return
        try:
            self._spares = Spares(schema, home.placement, tables, home.ahead_bytes, readable=self.device.type == "cuda")
        except (OSError, MemoryError, RuntimeError) as e:
            raise Unavailable(f"rows in files: got {e}, expected memory for {home.ahead_bytes / 2**20:.0f} MiB of them") from e
        self.spares = self._spares.rows
        near = 0 if home.replan_s is None else sum(p.hot for p in home.placement.tables)
        self.ahead = RowsAhead(self._spares.groups, schema.block_layout, source, min(_MOST_NEAR, near))


def _whole(tables: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tables on the device."""
    there = []
    with RowCopies() as copies:
        for t in tables:
            if device.type == "cpu" or t.is_cuda or t.nbytes < _LARGE:
                there.append(t.to(device).contiguous())
            else:
                there.append(torch.empty(t.shape, dtype=t.dtype, device=device))
                copies.add(t.contiguous(), None, 0, len(t), there[-1])
        copies.wait()
    return there


def _check(where: str, found: torch.Tensor | None, shape: tuple[int, ...], dtype: str) -> None:
    if found is None or tuple(found.shape) != shape or found.dtype != table_dtype(dtype):
        got = None if found is None else (tuple(found.shape), str(found.dtype))
        raise BundleError(f"{where}: got {got}, expected {shape} of {dtype}")
