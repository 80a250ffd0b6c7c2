"""One model's request: its body, built from the model's feature schema, from bytes to columns.

Owns types, lengths, finiteness and names; that each feature comes exactly once and fits its encoder is the encoder's to check.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json
from typing_extensions import TypedDict

from deployments.config import Limits
from deployments.scoring.bodies import STRICT, ErrorAnswer, Options, ScoreAnswer, ScoreRequest, ScoreRest
from deployments.scoring.faults import Words, first_error, refuse_unknown
from dpiframe_core.errors import InputError
from dpiframe_core.features.arrow_columns import rows_in
from dpiframe_core.features.candidate_columns import Encode, columns_of_rows, in_its_row
from dpiframe_core.features.packed_column import JsonColumns
from dpiframe_core.features.raw_columns import ColumnValues, split_text
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric
from kernels.runtime import c_build
from kernels.runtime.gc_pause import gc_paused

_ROWS_FOLLOW = re.compile(rb'"candidates"\s*:\s*\[')


class Addressed(BaseModel):
    """Only the keys that say which model a request is for."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInput:
    """A validated request, candidates in columns. Filled by `RequestForm.parse`.

    `anew` reads the body again, all values as Python has them: for what is wrong with columns that are still packed. `rows`:
    whether the body has a list of objects, by whose places faults are told.
    """

    model: str | None
    version: str | None
    context: Mapping[str, object]
    candidates: Mapping[str, ColumnValues]
    options: Options
    anew: "Callable[[], ScoreInput] | None" = None
    rows: bool = False

    def encoded(self, encode: Encode) -> RowBlock:
        """What `encode` makes of it. Raises InputError as that does, or as a careful reading of the body does."""
        try:
            return encode(self.candidates, self.context)
        except InputError as error:
            if self.anew is None:
                raise in_its_row(error) if self.rows else error from None
        return self.anew().encoded(encode)  # to be said as everywhere, of the values as Python has them


class RequestForm:
    """The request body of one model: validates bytes, and describes itself as JSON schema."""

    def __init__(self, model: str, schema: FeatureSchema, limits: Limits) -> None:
        self._features = frozenset(f.name for f in schema.features)
        self._most_rows = min(limits.max_row_dicts, limits.max_rows_per_request)
        self._kinds, self._most = {f.name: kinds for f in schema.features if (kinds := _kinds(f))}, limits.max_rows_per_request
        self.schema = schema
        values = {f.name: _documented(f, _value_type(f)) for f in schema.features}
        columns = {f.name: _documented(f, _list_of(_value_type(f), limits.max_rows_per_request)) for f in schema.features}
        rows = _list_of(_typed_dict(f"Candidate_{model}", values), self._most_rows)
        candidates: Any = _typed_dict(f"Columns_{model}", columns) | rows
        fields: Any = {
            "context": (_typed_dict(f"Context_{model}", values), {}),
            "candidates": (Annotated[candidates, Field(union_mode="left_to_right")], ...),
        }
        self.body: type[ScoreRequest] = create_model(f"ScoreRequest_{model}", __base__=ScoreRequest, **fields)
        rest: Any = {"context": fields["context"]}
        self.rest: type[ScoreRest] = create_model(f"ScoreRest_{model}", __base__=ScoreRest, **rest)

    def parse(self, body: bytes) -> ScoreInput:
        """Validates a body.

        Raises:
            NotJson: it is not JSON in UTF-8.
            InputError: it breaks a rule; `where` is the first bad path, such as `candidates.C1[3]`.
            TooLarge: it has more candidates than the deployment takes.
        """
        return self._packed(body) or self._unpacked(body)

    def _packed(self, body: bytes) -> ScoreInput | None:
        """The request with its columns of plain values as they lie in the body; None for all else, and whatever has a fault."""
        functions = c_build.request_extension()
        found = None if functions is None else functions.json_columns(body, self._kinds, self._most, self._most_rows)
        if found is None:
            return None
        parts, rows, rest = found
        try:
            with gc_paused():
                request = self.body.model_validate_json(rest)
        except ValidationError:
            return None
        self._refuse_unknown(request)
        others = request.candidates
        if not isinstance(others, dict) or not others.keys() <= self._features or any(len(v) != rows for v in others.values()):
            return None
        packed = JsonColumns(parts, rows)
        columns: Mapping[str, ColumnValues] = {**packed, **others} if others else packed
        options = request.options
        return ScoreInput(request.model, request.version, request.context, columns, options, lambda: self._unpacked(body))

    def _unpacked(self, body: bytes) -> ScoreInput:
        try:
            with gc_paused():  # a 4 MB body of a million lists took 1.3 s, not 0.4
                sound = self._from_sound_rows(body)
                request = sound or self.body.model_validate_json(body)
        except ValidationError as error:
            raise first_error(error) from None
        self._refuse_unknown(request)
        columns, rows = request.candidates, sound is not None or isinstance(request.candidates, list)
        if isinstance(columns, list):
            refuse_unknown("candidates[0].", columns[0], self._features)
            columns = columns_of_rows(columns)
        else:
            refuse_unknown("candidates.", columns, self._features)
        if not columns:
            raise InputError("candidates", columns, "at least one feature")
        return ScoreInput(request.model, request.version, request.context, columns, request.options, rows=rows)

    def _refuse_unknown(self, request: ScoreRequest | ScoreRest) -> None:
        if extra := request.model_extra:
            refuse_unknown("", extra, type(request).model_fields)
        if extra := request.options.model_extra:
            refuse_unknown("options.", extra, Options.model_fields)
        refuse_unknown("context.", request.context, self._features)

    def _from_sound_rows(self, body: bytes) -> ScoreRequest | None:
        """Rows turned into columns first and validated then, in half the time; None for all else, and whatever has a fault."""
        if not _ROWS_FOLLOW.search(body):
            return None
        try:
            given = from_json(body, allow_inf_nan=False)
            rows = given["candidates"]
            if not 1 <= len(rows) <= self._most_rows:
                return None
            columns = columns_of_rows(rows)
            return self.body.model_validate(given | {"candidates": columns}) if columns.keys() <= self._features else None
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, InputError):
            return None  # validated as JSON, it is said what and where

    def parse_rest(self, rest: bytes, candidates: Mapping[str, ColumnValues]) -> ScoreInput:
        """Validates what an Arrow stream says beside its columns.

        Raises:
            NotJson, InputError: as `parse`.
        """
        try:
            request = self.rest.model_validate_json(rest)
        except ValidationError as error:
            raise first_error(error) from None
        self._refuse_unknown(request)
        refuse_unknown("candidates.", candidates, self._features)
        if not candidates or not rows_in(candidates):
            raise InputError("candidates", Words("no rows or no columns"), "at least one candidate")
        return ScoreInput(request.model, request.version, request.context, candidates, request.options)


def addressed(body: bytes) -> Addressed:
    """Which model a body names, whatever else is in it.

    Raises:
        NotJson, InputError: as `RequestForm.parse`, for what it reads.
    """
    try:
        return Addressed.model_validate_json(body)
    except ValidationError as error:
        raise first_error(error) from None


def openapi_schemas(forms: Sequence[RequestForm]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a reference to each model's request, every schema that the score route refers to), for an OpenAPI document."""
    models: list[tuple[type[BaseModel], Literal["validation", "serialization"]]]
    models = [(form.body, "validation") for form in forms]
    models += [(ScoreAnswer, "serialization"), (ErrorAnswer, "serialization")]
    references, document = models_json_schema(models, ref_template="#/components/schemas/{model}")
    return [references[form.body, "validation"] for form in forms], document["$defs"]


def _kinds(f: Categorical | Numeric) -> int:
    """Of values that the feature takes as they are: bits of `Kind` (kernels/columns/cells.h); 0: others too."""
    if f.max_values > 1:
        return 0
    return 1 << 2 | 1 << 3 if isinstance(f, Numeric) else 1 << 1 if f.values == "string" else 1 << 2


def _value_type(f: Categorical | Numeric) -> Any:
    if isinstance(f, Numeric):
        return float | None
    one: Any = (str if f.values == "string" else int) | None
    if f.max_values == 1:
        return one
    many: Any = Annotated[list[one], Field(fail_fast=True)] | None
    if f.splitter is None:
        return many
    # Split here, not a union with text, whose errors would name both forms in their path.
    splitter, kind = f.splitter, f.values
    return Annotated[many, BeforeValidator(lambda value: split_text(value, splitter, kind))]


def _list_of(item: Any, max_length: int) -> Any:
    # Only the first error is answered; a list full of them must not cost more than a good one.
    return Annotated[list[item], Field(fail_fast=True, min_length=1, max_length=max_length)]


def _documented(f: Categorical | Numeric, annotation: Any) -> Any:
    how = f"up to {f.max_values} values, {f.pooling}" if f.max_values > 1 else "one value"
    if isinstance(f, Categorical) and f.splitter is not None:
        how += f", as a list or as text joined by {f.splitter!r}"
    what = f.encoder.type if isinstance(f, Categorical) else " ".join(["numeric", *(t.type for t in f.transforms)])
    return Annotated[annotation, Field(description=f"{f.scope} feature, {what}, {how}; null if missing")]


def _typed_dict(name: str, fields: Mapping[str, Any]) -> Any:
    """A dict, not a model, per part of the body: it holds only the keys that were sent, ready for the encoder as it is."""
    made = TypedDict(name, dict(fields), total=False)  # type: ignore[misc]  # noqa: UP013 (the keys are not known here)
    made.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return made
