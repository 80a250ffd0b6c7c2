"""Requests read by C and by Python: `python -m tests.deployments.scoring.fuzz.both_ways SEED CASES [streams]`

Bodies of JSON (columns, lists of objects, lists of requests), columns of lists and NumPy arrays, Arrow streams, which come
alone if asked for, and binary tensors. A finding is a block that differs by a bit, another error, an exception that is no error
of ours, or memory that grows.
"""

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from deployments.config import Limits
from deployments.http_api.arrow_body import read_stream
from deployments.http_api.score_list import is_list, items_of
from deployments.protocol import input as tensor_reader
from deployments.protocol.request import parse
from deployments.scoring.faults import NotJson
from deployments.scoring.job import Job
from deployments.scoring.request_form import RequestForm
from dpiframe_core.errors import InputError
from dpiframe_core.features.arrow_columns import ArrowColumns
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity
from kernels.runtime import c_build
from tests.deployments.http_api.fuzz_bodies import changed, resident_mb
from tests.deployments.scoring.fuzz.array_columns import columns
from tests.deployments.scoring.fuzz.arrow_streams import stream
from tests.deployments.scoring.fuzz.json_bodies import MOST_OBJECTS, MOST_ROWS, body, late_fault, request_list
from tests.deployments.scoring.test_packed_requests import SCHEMA as SOME
from tests.deployments.scoring.test_packed_requests import VOCABULARIES, tensors_of

_READY: dict[str, Any] = {"values": "int", "encoder": Identity(), "table": "t"}
SCHEMA = FeatureSchema(
    features=(
        *SOME.features,
        Categorical(name="ready", **_READY),
        Categorical(name="bag", max_values=3, missing_id=0, **_READY),
    ),
    tables=SOME.tables,
)

_SETTLED = 0.25  # of the cases: by then every cache and arena has been met
_MOST_GROWTH_MB = 24
_LATE_ROWS = 100_000
_MOST_SHARED = 100_000


class Reader:
    """One of the two ways: with `functions`, C's, or without them value by value."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self.packed = 0  # requests whose columns stay as they lie in a body until they are encoded
        self.in_place = 0  # those of Arrow
        with self._chosen():
            self.form = RequestForm("m", SCHEMA, Limits(max_rows_per_request=MOST_ROWS, max_row_dicts=MOST_OBJECTS))
            self.long_form = RequestForm("m", SCHEMA, Limits(max_rows_per_request=_LATE_ROWS, max_row_dicts=_LATE_ROWS))
            self.encoder = Encoder(SCHEMA, VOCABULARIES)
        if functions is None:
            self.encoder._multi_column, self.encoder._alone = [], list(self.encoder._fields.values())
        scorer = SimpleNamespace(allocate=RowBlock.allocate)
        self.served: Any = SimpleNamespace(encoded=PreencodedReader(SCHEMA), scorer=scorer, encode=self._encode)

    def outcome(self, read: Callable[["Reader"], object]) -> object:
        with self._chosen():
            try:
                return read(self)
            except InputError as error:
                return type(error).__name__, error.where, error.got, error.expected

    def of_json(self, form: RequestForm, given: bytes) -> object:
        request = form.parse(given)
        self.packed += request.anew is not None
        rest = request.model, request.version, request.options, request.context
        return repr(rest), request.encoded(self.encoder.encode).buffer.tobytes()

    def of_stream(self, given: bytes) -> object:
        read = read_stream(given, MOST_ROWS, _MOST_SHARED)
        request = self.form.parse_rest(read.rest, read.candidates)
        self.in_place += isinstance(request.candidates, ArrowColumns)
        return repr(request.context), request.encoded(self.encoder.encode).buffer.tobytes()

    def of_columns(self, given: Any) -> object:
        candidates, context, per_context = given
        return self.encoder.encode(candidates, context, RowBlock.allocate, per_context).buffer.tobytes()

    def of_tensors(self, given: bytes, length: str) -> object:
        return tensor_reader.encode(self.served, parse(given, length), MOST_ROWS, Job("1", 0.0)).buffer.tobytes()

    def of_list(self, given: bytes) -> object:
        """Of each item; C leaves it to whoever reads one whether it is JSON, and then none is read."""
        if not is_list(given):
            return "no list"
        try:
            found = [self.outcome(lambda r, item=item: r.of_json(r.form, item)) for item in items_of(given)]  # type: ignore[misc]
        except NotJson:
            found = [("NotJson",)]
        return "not JSON" if any(isinstance(one, tuple) and one[0] == "NotJson" for one in found) else found

    def _encode(self, candidates: Any, context: Any, context_rows: Any = None) -> RowBlock:
        return self.encoder.encode(candidates, context, RowBlock.allocate, context_rows)

    def _chosen(self) -> Any:
        return patch.object(c_build, "request_extension", lambda: self._functions)


@dataclass
class Outcome:
    """Of a run. `kinds`: cases by form, and whether a block was made. `findings`: a line each, with the case's number.

    `packed`, `in_place`: requests of JSON and of Arrow that C read where they lie.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    packed: int = 0
    in_place: int = 0
    grown_mb: float = 0.0
    seconds: float = 0.0

    def report(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.kinds.items()))
        read = self.packed + self.in_place
        head = f"{self.kinds.total():,} cases in {self.seconds:.0f} s, {read:,} read where they lie; {kinds}"
        return "\n".join(
            [f"{head}; memory grew by {self.grown_mb:.1f} MB", f"{len(self.findings)} findings", *self.findings[:20]]
        )


def case(seed: int, number: int, form: str = "") -> tuple[str, Callable[[Reader], object], object]:
    """Its form, how it is read, and what it is."""
    rng = random.Random(seed << 32 | number)
    if number % 20_000 == 9_999 and not form:
        given = late_fault(rng, _LATE_ROWS)
        return "late faults", lambda r: r.of_json(r.long_form, given), given[-200:]
    drawn = rng.random()
    if form == "streams" or drawn > 0.85:
        sent_stream = stream(rng, 0.7)
        return "streams", lambda r: r.of_stream(sent_stream), sent_stream
    if drawn < 0.45:
        whole = body(rng)
        return "bodies", lambda r: r.of_json(r.form, whole), whole
    if drawn < 0.52:
        listed = request_list(rng)
        return "lists of requests", lambda r: r.of_list(listed), listed
    if drawn < 0.72:
        made = columns(rng)
        return "arrays", lambda r: r.of_columns(made), made
    sent, length = tensors_of(_tensor_request(rng))
    if rng.random() < 0.7:
        head = int(length) if rng.random() < 0.8 else 0
        sent = sent[:head] + changed(sent[head:] or b"\0", rng)
    return "tensors", lambda r: r.of_tensors(sent, length), (sent, length)


def _tensor_request(rng: random.Random) -> dict[str, Any]:
    n = rng.choice((1, 2, 3, 40))
    texts, numbers = ["a", "ö", "long text of a value", "", None], [0.0, -0.5, 2.5, 1e30, None]
    kinds: dict[str, list[Any]] = {
        "item": texts, "site": texts, "strict": ["a", "ö"], "place": [0, 5, 30, None], "known": [4, 5, None],
        "price": [0.0, 2.5], "wide": numbers, "step": numbers, "tags": [["a"], [], ["a", "b"]], "ready": [0, 19],
        "bag": [[1], [], [0, 2, 19]],
    }  # fmt: skip
    candidates: dict[str, Any] = {name: rng.choices(values, k=n) for name, values in kinds.items()}
    for name, dtype in (("price", "f4"), ("place", "i4"), ("known", "i8"), ("ready", "i8")):
        if rng.random() < 0.5:
            candidates[name] = np.array([0 if v is None else v for v in candidates[name]], dtype)
    return {"candidates": candidates, "context": {"user": rng.choice(texts), "age": rng.choice(numbers)}}


def fuzz(seed: int, cases: int, form: str = "") -> Outcome:
    outcome, begun = Outcome(), time.monotonic()
    functions = c_build.request_extension()
    assert functions is not None
    of_c, of_python = Reader(functions), Reader(None)
    before = 0.0
    for number in range(cases):
        kind, read, given = case(seed, number, form)
        found: list[object] = []
        for way in (of_c, of_python):
            try:
                found.append(way.outcome(read))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
                outcome.findings.append(f"case {number}: {error!r} by {'C' if way is of_c else 'Python'} of {str(given)[:400]}")
        made = isinstance(found[0], bytes) or (isinstance(found[0], tuple) and isinstance(found[0][-1], bytes))
        outcome.kinds[f"{kind} {'read' if made or kind == 'lists of requests' else 'refused'}"] += 1
        if found[0] != found[1]:
            outcome.findings.append(f"case {number}: {found[0]!s:.200} by C, {found[1]!s:.200} by Python, of {given!s:.600}")
        if number == int(cases * _SETTLED):
            before = resident_mb()
    outcome.packed, outcome.in_place = of_c.packed, of_c.in_place
    outcome.grown_mb, outcome.seconds = resident_mb() - before, time.monotonic() - begun
    if outcome.grown_mb > _MOST_GROWTH_MB and "ASAN_OPTIONS" not in os.environ:  # a sanitizer keeps the stacks of allocations
        outcome.findings.append(f"memory: got {outcome.grown_mb:.1f} MB more, expected at most {_MOST_GROWTH_MB}")
    return outcome


if __name__ == "__main__":
    told = fuzz(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    print(told.report())
    raise SystemExit(bool(told.findings))
