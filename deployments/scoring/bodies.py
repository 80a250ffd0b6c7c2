"""Bodies of `POST /v1/score` and of its answers, as pydantic models: what every model's have in common."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# Strict: no text for a number, no 1.0 for an integer, no bool for either; and JSON's non-standard NaN and Infinity are refused.
# Unknown keys are collected and then refused by `RequestForm.parse`: with extra="forbid" pydantic-core makes an error of each,
# and a 4 MB body of unknown keys held the event loop for 3 seconds.
STRICT = ConfigDict(
    strict=True, frozen=True, extra="allow", allow_inf_nan=False, json_schema_extra={"additionalProperties": False}
)

Rows = list[dict[str, Any]]
Columns = dict[str, list[Any]]


class Options(BaseModel):
    """How a request is served. `deadline_ms` counts from its arrival; a higher `priority` is scored first.

    `key`: whose requests are to be scored by one version, while two of them share a model's.
    """

    model_config = STRICT

    deadline_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    top_k: Annotated[int, Field(ge=1)] | None = None
    key: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class ScoreRequest(BaseModel):
    """What every model's request has in common. The models of `RequestForm` narrow `context` and `candidates`."""

    model_config = STRICT

    model: Annotated[str, Field(description="Which model scores; may be left out if only one is served.")] | None = None
    version: Annotated[str, Field(description="Which version scores; else the live one, or its canary.")] | None = None
    context: dict[str, Any] = {}
    candidates: Columns | Rows
    options: Options = Options()


class ScoreRest(BaseModel):
    """All of a request but its candidates, which come as an Arrow table."""

    model_config = STRICT

    model: str | None = None
    version: str | None = None
    context: dict[str, Any] = {}
    options: Options = Options()


class TopK(BaseModel):
    """The best candidates by the first task's score, best first; equal scores keep the request's order."""

    indices: list[int]
    scores: list[float] | dict[str, list[float]]


class Timing(BaseModel):
    """Milliseconds. `total` is from the request's first byte in this process to its answer."""

    queue: float
    encode: float
    device: float
    total: float


class ScoreAnswer(BaseModel):
    """`scores` is a list in the order of the candidates; for a model of several tasks, one such list per task."""

    model: str
    version: str
    request_id: str
    scores: list[float] | dict[str, list[float]]
    oov_count: Annotated[int, Field(description="Values that met no vocabulary entry.")]
    degraded_rows: Annotated[int, Field(description="Rows of tables that were late; left out if none was.")] = 0
    timing_ms: Timing
    top_k: TopK | None = None


class ErrorDetail(BaseModel):
    """`where`, `got` and `expected` are present if one value of the request is to blame.

    `status`: that of this error, in the answer to a list of requests, whose own is 200.
    """

    code: str
    message: str
    where: str | None = None
    got: str | None = None
    expected: str | None = None
    retry_after_s: float | None = None
    request_id: str
    status: int | None = None


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail
