"""Where rows of models' tables are read, as metrics: what engines count since their start, reported by what it grew."""

from collections.abc import Callable
from typing import Protocol

from deployments.metrics import FOUND, TIERS, FarFigures, TableFigures

Of = tuple[str, str]  # model, version
Tags = dict[str, str]


class Counter(Protocol):
    """Ray's."""

    def inc(self, value: float, tags: Tags, /) -> None: ...


class Gauge(Protocol):
    """Ray's."""

    def set(self, value: float, tags: Tags, /) -> None: ...


class TableMetrics:
    """Not thread-safe but for `register`.

    Args:
        reads: by `TIERS`. moved: rows that came into the GPU's memory. far: by `FOUND`. promoted: rows of files, by the memory
            that keeps them.
    """

    def __init__(self, reads: Counter, moved: Counter, far: Counter, promoted: Gauge) -> None:
        self._reads, self._moved, self._far, self._promoted = reads, moved, far, promoted
        self._tables: dict[Of, tuple[Callable[[], TableFigures | None], TableFigures]] = {}
        self._files: dict[Of, tuple[Callable[[], FarFigures | None], FarFigures]] = {}

    def register(self, of: Of, tables: Callable[[], TableFigures | None], far: Callable[[], FarFigures | None]) -> None:
        """A model's, asked at each report; None at once: there are none."""
        self.forget(of)  # of a version that was unloaded a moment ago
        if (first := tables()) is not None:
            self._tables[of] = tables, first
        if (found := far()) is not None:
            self._files[of] = far, found

    def report(self) -> None:
        for of, (tables, before) in list(self._tables.items()):
            if (now := tables()) is None:
                continue
            self._tables[of] = tables, now
            for tier in TIERS:
                _grow(self._reads, getattr(now, tier) - getattr(before, tier), tags_of(of) | {"tier": tier})
            _grow(self._moved, now.rows_moved - before.rows_moved, tags_of(of))
        for of, (far, earlier) in list(self._files.items()):
            if (found := far()) is None:
                continue
            self._files[of] = far, found
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
