"""Where rows of models' tables are read, as metrics: what engines count since their start, reported by what it grew."""

from typing import TYPE_CHECKING, Protocol

from deployments.metrics import FOUND, TIERS

if TYPE_CHECKING:
    from dpiframe_core.far_rows.far_reads import FarReads
    from dpiframe_core.replan.replanner import TableReads

Of = tuple[str, str]  # model, version
Tags = dict[str, str]


class Counter(Protocol):
    """Ray's."""

    def inc(self, value: float, tags: Tags, /) -> None: ...


class Gauge(Protocol):
    """Ray's."""

    def set(self, value: float, tags: Tags, /) -> None: ...


class TableReader(Protocol):
    """An engine. None at once: there are no such reads."""

    @property
    def table_reads(self) -> "TableReads | None": ...

    @property
    def far_reads(self) -> "FarReads | None": ...


class TableMetrics:
    """Not thread-safe but for `register`.

    Args:
        reads: by `TIERS`. moved: rows that came into the GPU's memory. far: by `FOUND`. promoted: rows of files, by the memory
            that keeps them.
    """

    def __init__(self, reads: Counter, moved: Counter, far: Counter, promoted: Gauge) -> None:
        self._reads, self._moved, self._far, self._promoted = reads, moved, far, promoted
        self._tables: dict[Of, tuple[TableReader, TableReads]] = {}
        self._files: dict[Of, tuple[TableReader, FarReads]] = {}

    def register(self, of: Of, engine: TableReader) -> None:
        """A model's, asked at each report."""
        self.forget(of)  # of a version that was unloaded a moment ago
        if (first := engine.table_reads) is not None:
            self._tables[of] = engine, first
        if (found := engine.far_reads) is not None:
            self._files[of] = engine, found

    def report(self) -> None:
        for of, (engine, before) in list(self._tables.items()):
            if (now := engine.table_reads) is None:
                continue
            self._tables[of] = engine, now
            for tier in TIERS:
                _grow(self._reads, getattr(now, tier) - getattr(before, tier), tags_of(of) | {"tier": tier})
            _grow(self._moved, now.rows_moved - before.rows_moved, tags_of(of))
        for of, (engine, earlier) in list(self._files.items()):
            if (found := engine.far_reads) is None:
                continue
            self._files[of] = engine, found
            for where in FOUND:
                _grow(self._far, getattr(found, where) - getattr(earlier, where), tags_of(of) | {"found": where})
            self._keep(of, found.near, found.staying)

    def forget(self, of: Of) -> None:
        """A gauge is shown with its last value for good: zero then."""
        self._tables.pop(of, None)
        if self._files.pop(of, None) is not None:
            self._keep(of, 0, 0)

    def _keep(self, of: Of, near: int, staying: int) -> None:
        for memory, rows in (("gpu", near), ("host", staying)):
            self._promoted.set(rows, tags_of(of) | {"memory": memory})


def tags_of(of: Of) -> Tags:
    return {"model": of[0], "version": of[1]}


def _grow(counter: Counter, more: int, tags: Tags) -> None:
    if more > 0:  # Ray refuses to add nothing
        counter.inc(more, tags)
