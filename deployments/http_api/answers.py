"""Every answer as bytes: scores, and each error in one form with its status. Knows no FastAPI.

Errors are `{"error": {"code", "message", "request_id"}}`, with "where", "got" and "expected" if a value is to blame.
"""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pydantic_core import to_json

from deployments.http_api.request_body import Header, Send
from deployments.scoring.job import Job
from deployments.scoring.served_model import ModelInfo
from dpiframe_core.errors import DPIFrameError, InputError, Overloaded
from dpiframe_core.features.row_block import Floats

_BODY_LEFT = {401, 403, 408, 413}  # statuses of requests whose body is not read to its end
_random = random.Random()  # of its own seed; ids are no secrets, and the system's costs 1 us
_REQUEST_ID = re.compile(rb"[ -~]{1,128}")


class Answer(NamedTuple):
    """A whole HTTP response. Its outcome is "ok" or the error's code."""

    status: int
    headers: tuple[Header, ...]
    body: bytes
    outcome: str


def request_id_of(headers: Iterable[Header]) -> str:
    """The client's `X-Request-ID` if it is 1 to 128 printable ASCII characters, else a fresh one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value) and value.strip():
            return value.decode("ascii")
    return fresh_request_id()


def fresh_request_id() -> str:
    return f"{_random.getrandbits(64):016x}"


async def send_answer(answer: Answer, send: Send) -> None:
    """Sends it over ASGI."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body})


def score_answer(model: ModelInfo, job: Job, scores: Floats, timing_ms: Mapping[str, float], top_k: int | None) -> Answer:
    """The answer to a scored request. `scores` is float32[n, tasks], all finite."""
    return json_answer(200, job.request_id, score_body(model, job, scores, timing_ms, top_k), "ok")


def score_body(
    model: ModelInfo, job: Job, scores: Floats, timing_ms: Mapping[str, float], top_k: int | None
) -> dict[str, object]:
    """As `ScoreAnswer` has it."""
    body: dict[str, object] = {
        "model": model.name,
        "version": model.version,
        "request_id": job.request_id,
        "scores": _by_task(model.tasks, scores),
        "oov_count": job.oov_count,
        **({"degraded_rows": job.degraded_rows} if job.degraded_rows else {}),
        "timing_ms": {name: round(ms, 3) for name, ms in timing_ms.items()},
    }
    if top_k is not None:
        best = np.argsort(-scores[:, 0], kind="stable")[:top_k]
        body["top_k"] = {"indices": best.tolist(), "scores": _by_task(model.tasks, scores[best])}
    return body


def error_answer(error: DPIFrameError, request_id: str) -> Answer:
    """An error that was raised on purpose."""
    extra: tuple[Header, ...] = ()
    if isinstance(error, Overloaded):
        ms = math.ceil(error.retry_after_s * 1e3)
        # HTTP's own header knows whole seconds only; a queue drains in milliseconds.
        extra = (b"retry-after", b"%d" % max(1, math.ceil(ms / 1e3))), (b"retry-after-ms", b"%d" % max(1, ms))
    if error.status in _BODY_LEFT:
        extra = ((b"connection", b"close"),)
    if error.status == 401:
        extra = (*extra, (b"www-authenticate", b"Bearer"))
    return json_answer(error.status, request_id, {"error": error_detail(error, request_id)}, error.code, extra)


def error_detail(error: DPIFrameError, request_id: str) -> dict[str, object]:
    """As `ErrorDetail` has it."""
    detail: dict[str, object] = {"code": error.code, "message": str(error)}
    if isinstance(error, InputError):
        detail |= {"where": error.where, "got": error.got, "expected": error.expected}
    if isinstance(error, Overloaded):
        detail["retry_after_s"] = round(error.retry_after_s, 4)
    return detail | {"request_id": request_id}


def plain_error(status: int, code: str, message: str, request_id: str, extra: tuple[Header, ...] = ()) -> Answer:
    """An error without a class of its own: an unknown path, a wrong method, a fault of ours."""
    return json_answer(status, request_id, {"error": {"code": code, "message": message, "request_id": request_id}}, code, extra)


def internal_error(request_id: str) -> Answer:
    """What a client learns of a fault of ours: nothing but where to look it up."""
    return plain_error(500, "internal", internal_message(request_id), request_id)


def internal_message(request_id: str) -> str:
    return f"server: got an unexpected error, expected none; its log has it under request id {request_id}"


def _by_task(tasks: Sequence[str], scores: Floats) -> list[float] | dict[str, list[float]]:
    # As doubles, printed at full length: every digit counts again when a client reads it as float32, at 60 us for 1,000 scores.
    if len(tasks) == 1:
        return scores[:, 0].tolist()  # type: ignore[no-any-return]
    return {task: scores[:, i].tolist() for i, task in enumerate(tasks)}


def json_answer(status: int, request_id: str, content: object, outcome: str, extra: Iterable[Header] = ()) -> Answer:
    """An answer whose body is `content` as JSON."""
    body = to_json(content)
    headers = (
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode("ascii")),
        *extra,
    )
    return Answer(status, headers, body, outcome)
