"""Requests whose values are ids and model-ready numbers already -> `RowBlock`: checked and copied at once.

Owns that every id is a row of its tables and every number finite. `encoder` does the same for raw values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import SECTIONS, BlockLayout, IdSection, Section
from dpiframe_core.features.id_rule import id_rule, names_of
from dpiframe_core.features.raw_columns import Int64s
from dpiframe_core.features.row_block import Floats, RowBlock
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema
from kernels.lookup.batch_header import HeaderWord
from kernels.runtime import c_build

_IDS: tuple[IdSection, ...] = ("context_ids", "candidate_ids")
_CONTEXT: tuple[Section, ...] = ("context_ids", "context_dense")
_CANDIDATE: tuple[Section, ...] = ("candidate_ids", "candidate_dense")
_ID_DTYPES, _NUMBER_DTYPE = (np.dtype(np.int32), np.dtype(np.int64)), np.dtype(np.float32)

CONTEXT_ROWS = "context_rows"  # the tensor's name, and errors'

Sections = Mapping[Section, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """Where sections lie in the bytes of requests that differ in their values alone, and what they have in a block.

    Attributes:
        ids: of each section its first byte and its end, whether its ids are wide, its rows, and where they go in `places`.
        numbers: of each section its first byte, its end, and where it goes.
    """

    rows: int
    contexts: int
    ids: tuple[tuple[int, int, bool, int, int, IdSection], ...]
    numbers: tuple[tuple[int, int, int], ...]


class PreencodedReader:
    """Reads encoded requests of one schema. Immutable, so that threads may share it."""

    def __init__(self, schema: FeatureSchema) -> None:
        self.schema = schema
        self.scopes = {f.name: f.scope for f in schema.features}
        self.single = frozenset(f.name for f in schema.features if f.max_values == 1)
        layout = schema.block_layout
        self.widths: dict[Section, int] = {
            "context_ids": len(layout.context_ids.widths), "candidate_ids": len(layout.candidate_ids.widths),
            "context_dense": layout.context_dense, "candidate_dense": layout.candidate_dense,
        }  # fmt: skip
        self._names = {section: names_of(schema, section) for section in SECTIONS}
        self._rules = {section: id_rule(schema, section) for section in _IDS}
        c_build.request_extension()  # built now, not at the first request

    def block(
        self,
        sections: Sections,
        allocate: Callable[[BlockLayout, int, int], RowBlock] = RowBlock.allocate,
        context_rows: Int64s | None = None,
    ) -> RowBlock:
        """A block of n >= 1 candidates.

        Args:
            sections: candidate_ids int32|int64[n, Ci], candidate_dense float32[n, Di], context_ids and context_dense alike with
                one row, which all candidates share, or n. One without columns may be left out. Columns in the schema's order.
            context_rows: how many candidates each row of the context sections is for, in their order (`check_context_rows`).

        Raises:
            InputError: a section lacks or has another shape or dtype, an id is no row of its tables, a number is not finite.
        """
        rows, contexts = self._shape(sections, None if context_rows is None else len(context_rows))
        block = allocate(self.schema.block_layout, rows, contexts)
        if context_rows is not None:
            check_context_rows(context_rows, rows)
            block.request_of_row[:] = np.repeat(np.arange(contexts), context_rows)
        elif contexts > 1:
            block.request_of_row[:] = np.arange(rows)
        for part, section in enumerate(SECTIONS, 1):
            given = sections.get(section)
            if given is None or not given.shape[1]:
                continue
            if section == "context_ids" or section == "candidate_ids":
                self._put_ids(np.ascontiguousarray(given), block, part, section)
            else:
                self._put_numbers(np.ascontiguousarray(given), block, part, section)
        return block

    def plan(self, sections: Mapping[Section, tuple[tuple[int, ...], np.dtype[Any], int]]) -> SectionPlan:
        """Of sections, each by its shape, dtype and end among bytes, that `block` has taken once."""
        ids, numbers = [], []
        for part, section in enumerate(SECTIONS, 1):
            if section not in sections:
                continue
            shape, dtype, end = sections[section]
            start = end - shape[0] * shape[1] * dtype.itemsize
            if start == end:
                continue
            if section == "context_ids" or section == "candidate_ids":
                ids.append((start, end, dtype.itemsize == 8, shape[0], part, section))
            else:
                numbers.append((start, end, part))
        rows = max(sections[s][0][0] for s in _CANDIDATE if s in sections)
        contexts = max((sections[s][0][0] for s in _CONTEXT if s in sections and self.widths[s]), default=1)
        return SectionPlan(rows, contexts, tuple(ids), tuple(numbers))

    def planned(
        self, plan: SectionPlan, data: memoryview, allocate: Callable[[BlockLayout, int, int], RowBlock]
    ) -> RowBlock | None:
        """The block of the bytes of one more such request; None if a value is not what it should be, which is for `block`."""
        functions = c_build.request_extension()
        if functions is None:
            return None
        block = allocate(self.schema.block_layout, plan.rows, plan.contexts)
        buffer, places = block.buffer, block.places
        if plan.contexts > 1:
            block.request_of_row[:] = np.arange(plan.rows)
        for start, end, wide, rows, part, section in plan.ids:
            rule = self._rules[section]
            if functions.pack_ids(rule.legal, data[start:end], wide, rows, buffer, places[part], rule.record.nbytes):
                return None
        for start, end, part in plan.numbers:
            if functions.copy_numbers(data[start:end], buffer, places[part]):
                return None
        return block

    def told(self, plan: SectionPlan) -> tuple[tuple[tuple[Any, ...], ...], tuple[tuple[int, int, int], ...]]:
        """What `planned` does, for C elsewhere: of ids the first byte, the end, whether they are wide, rows, where they go in
        `places` and what is legal (see id_records.h); and the plan's numbers.
        """
        return tuple((*ids[:5], self._rules[ids[5]].legal) for ids in plan.ids), plan.numbers

    def features(
        self,
        values: Mapping[str, npt.NDArray[Any]],
        allocate: Callable[[BlockLayout, int, int], RowBlock] = RowBlock.allocate,
        context_rows: Int64s | None = None,
    ) -> RowBlock:
        """The same from one array a feature, [n or 1] or, for a bag, [n or 1, up to max_values] with -1 at the end (or in
        front, of a feature that aligns its values with the last).

        Raises:
            InputError: as `block`; and a feature lacks, is unknown, or has too many values.
        """
        known = self.schema.columns
        for name in values:
            if name not in known:
                raise InputError("inputs", name, "a feature of the model")
        for name in known:
            if name not in values:
                raise InputError(f"inputs.{name}", None, "the feature, as ids or numbers")
        heights: dict[bool, int] = {False: 1, True: 1}
        for f in self.schema.features:
            of_candidate = f.scope == "candidate"
            heights[of_candidate] = max(heights[of_candidate], len(values[f.name]))
        if context_rows is not None:
            heights[False] = len(context_rows)
        elif heights[False] > 1:  # a context of its own for each candidate
            heights[True] = max(heights.values())
        sections: dict[Section, npt.NDArray[Any]] = {}
        for section, width in self.widths.items():
            if section == "context_ids" or section == "candidate_ids":
                sections[section] = np.full((heights[section == "candidate_ids"], width), -1, np.int64)
            else:
                sections[section] = np.empty((heights[section == "candidate_dense"], width), np.float32)
        for f in self.schema.features:
            self._place(f, values[f.name], sections)
        return self.block(sections, allocate, context_rows)

    def _put_ids(self, ids: npt.NDArray[Any], block: RowBlock, part: int, section: IdSection) -> None:
        """`part`: of `block.places`."""
        rule, functions = self._rules[section], c_build.request_extension()
        if functions is not None:
            at, record_bytes = block.places[part], rule.record.nbytes
            illegal = functions.pack_ids(rule.legal, ids, ids.itemsize == 8, len(ids), block.buffer, at, record_bytes)
            if illegal == 0:
                return
        ids, replaced = rule.settled(ids, section)
        rule.record.pack(ids, getattr(block, section))
        if replaced:
            block.header[HeaderWord.OOV_COUNT] += replaced

    def _put_numbers(self, numbers: Floats, block: RowBlock, part: int, section: Section) -> None:
        functions = c_build.request_extension()
        if functions is not None and functions.copy_numbers(numbers, block.buffer, block.places[part]) == 0:
            return
        if np.count_nonzero(each := np.isfinite(numbers)) != each.size:
            row, column = np.unravel_index(int(np.argmin(each)), each.shape)
            rule = f"a finite number for {self._names[section][column]}"
            raise InputError(f"{section}[{row}, {column}]", float(numbers[row, column]), rule)
        getattr(block, section)[:] = numbers

    def _place(self, f: Feature, given: npt.NDArray[Any], sections: dict[Section, npt.NDArray[Any]]) -> None:
        place = self.schema.columns[f.name]
        column = sections[place.section]
        array = given[:, None] if given.ndim == 1 else given
        if array.ndim != 2 or array.shape[1] > f.max_values or not array.shape[1] or len(array) not in (1, len(column)):
            shape = f"[{len(column)} or 1]" if f.max_values == 1 else f"[{len(column)} or 1, 1 to {f.max_values}]"
            raise InputError(f"inputs.{f.name}", list(given.shape), shape)
        if array.dtype.kind not in ("i" if f.is_id else "fi"):
            raise InputError(f"inputs.{f.name}", str(array.dtype), "ids of int32 or int64" if f.is_id else "float32")
        with np.errstate(over="ignore"):  # refused as infinite
            start = place.start + (f.max_values - array.shape[1] if isinstance(f, Categorical) and f.align == "last" else 0)
            column[:, start : start + array.shape[1]] = array

    def _shape(self, sections: Sections, several: int | None) -> tuple[int, int]:
        """(rows, contexts); of `several` contexts, if the request says of how many."""
        for section, width in self.widths.items():
            given = sections.get(section)
            if given is None:
                if width:
                    raise InputError(section, None, f"shape [{_rows_of(section)}, {width}]")
            elif given.ndim != 2 or given.shape[1] != width:
                raise InputError(section, list(given.shape), f"shape [{_rows_of(section)}, {width}]")
            elif section in _IDS and given.dtype not in _ID_DTYPES:
                raise InputError(section, str(given.dtype), "int32 or int64")
            elif section not in _IDS and given.dtype != _NUMBER_DTYPE:
                raise InputError(section, str(given.dtype), "float32")
        rows = max((len(sections[s]) for s in _CANDIDATE if s in sections), default=0)
        if rows < 1:
            raise InputError("candidate_ids", rows, "at least one row")
        for section in _CANDIDATE:
            if section in sections and len(sections[section]) != rows:
                raise InputError(section, len(sections[section]), f"{rows} rows")
        contexts = [s for s in sections if s in _CONTEXT and self.widths[s]]
        own = max((len(sections[s]) for s in contexts), default=1)
        if several is not None:
            for section in contexts:
                if len(sections[section]) != several:
                    raise InputError(section, len(sections[section]), f"{several} rows, as many as {CONTEXT_ROWS} has")
            return rows, several
        for section in contexts:
            if (height := len(sections[section])) != own or own not in (1, rows):
                raise InputError(section, height, f"one row for all candidates, or {rows} in every context section")
        return rows, own


def check_context_rows(context_rows: Int64s, rows: int) -> None:
    """Raises InputError unless there are contexts, each for at least one candidate, and together for all."""
    if not context_rows.size:
        raise InputError(CONTEXT_ROWS, [], "at least one context")
    if int(context_rows.min()) < 1 or int(context_rows.max()) > rows:
        i = int(np.argmin((context_rows >= 1) & (context_rows <= rows)))
        raise InputError(f"{CONTEXT_ROWS}[{i}]", int(context_rows[i]), f"1 to {rows} candidates")
    if int(context_rows.sum()) != rows:
        raise InputError(CONTEXT_ROWS, int(context_rows.sum()), f"a sum of {rows}, the candidates")


def _rows_of(section: str) -> str:
    return "n" if section.startswith("candidate") else "1 or n"
