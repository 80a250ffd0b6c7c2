"""The Open Inference Protocol over REST, `/v2/...`, as a bare ASGI application that answers every request itself, errors too.

Owns paths, methods and the form of answers. Knows no FastAPI and no Ray.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from deployments.access.gate import Gate
from deployments.http_api import answers
from deployments.http_api.answers import Answer, json_answer
from deployments.http_api.request_body import (
    BINARY,
    JSON,
    ClientGone,
    HangUp,
    Header,
    Receive,
    Scope,
    Send,
    header_of,
    media_type_of,
    read_body,
)
from deployments.protocol.inference import SCORES, Inference, answer_parameters
from deployments.protocol.request import InferRequest, parse
from deployments.scoring.faults import first_error
from deployments.scoring.job import Job
from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import DPIFrameError, InputError, Unavailable
from dpiframe_core.features.row_block import Floats

log = logging.getLogger(__name__)

_PASSED_ON = {b"retry-after", b"retry-after-ms", b"connection", b"www-authenticate"}
_MEDIA = BINARY, JSON
BINARY_TYPE = b"content-type", BINARY.encode()
ENVELOPE_LENGTH = b"inference-header-content-length"


class _IndexRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    ready: bool = False


class _NoRoute(InputError):
    status = 404
    code = "not_found"


class _WrongMethod(InputError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, got: str, allowed: str, path: list[str]) -> None:
        super().__init__("method", got, f"{allowed} for /v2/{'/'.join(path)}")
        self.allowed = allowed


class InferRoute:
    """All of `/v2`, to be mounted there. `gate`: who may ask; None: anybody."""

    def __init__(self, inference: Inference, gate: Gate | None = None) -> None:
        self.inference, self.gate = inference, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # a mount gets those too
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = scope["headers"]
        request_id = answers.request_id_of(headers)
        answer: Answer | None
        try:
            path = _steps(scope)
            if path[:1] == ["models"] and path[-1:] == ["infer"] and len(path) in (3, 5):
                answer = await self._infer(_only("POST", scope, path), headers, receive, request_id)
            else:
                if self.gate is not None:
                    self.gate.require(headers)
                answer = await self._ask(path, scope, receive, request_id)
        except ClientGone:
            return
        except DPIFrameError as error:
            answer = error_answer(error, request_id)
        except Exception:
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
            answer = internal_error(request_id)
        if answer is not None:
            await answers.send_answer(answer, send)

    def begun(self, job: Job, model: tuple[str, str], headers: list[Header], kind: bytes | None) -> None:
        """Notes the model of a request that may ask for it in its job; `Inference.chosen` says later which version scores.

        Raises:
            DPIFrameError: whatever is known to be wrong before the body is read.
        """
        if self.gate is not None:
            self.gate.require(headers, "score")
        self.inference.find(job, *model)
        media_type_of(kind, _MEDIA)

    async def _infer(self, path: list[str], headers: list[Header], receive: Receive, request_id: str) -> Answer | None:
        scoring = self.inference.scoring
        job = scoring.begin(request_id, headers)
        outcome = "cancelled"
        try:
            model = _model(path[:-1])
            self.begun(job, model, headers, header_of(headers, b"content-type"))
            body = await read_body(headers, receive, scoring.limits)
            scoring.over(job, "receive")
            length = header_of(headers, ENVELOPE_LENGTH)
            request = parse(body, None if length is None else length.decode("latin-1"))
            with HangUp(receive):
                served, scores = await self.inference.infer(job, *model, request, len(body))
            answer = scores_answer(served, request, job, scores)
            outcome = "ok"
            return answer
        except DPIFrameError as error:
            outcome = error.code
            raise
        except ClientGone:
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            scoring.finish(job, outcome)

    async def _ask(self, path: list[str], scope: Scope, receive: Receive, request_id: str) -> Answer:
        """Everything but inference. Bodies are read only where the protocol gives them a meaning."""
        inference = self.inference
        match path:
            case []:
                return _get(scope, path, inference.server_metadata, request_id)
            case ["health", "live"]:
                return _get(scope, path, lambda: {"live": True}, request_id)
            case ["health", "ready"]:
                return _get(scope, path, lambda: {"ready": _or_503(inference.server_ready(), "server")}, request_id)
            case ["models", "stats"]:
                return _get(scope, path, lambda: inference.model_statistics("", ""), request_id)
            case ["models", _, "ready"] | ["models", _, "versions", _, "ready"]:
                name, version = _model(path[:-1])
                ready = lambda: {"name": name, "ready": _or_503(inference.model_ready(name, version), f"model {name}")}  # noqa: E731
                return _get(scope, path, ready, request_id)
            case ["models", _, "stats"] | ["models", _, "versions", _, "stats"]:
                return _get(scope, path, lambda: inference.model_statistics(*_model(path[:-1])), request_id)
            case ["models", _, "config"] | ["models", _, "versions", _, "config"]:
                return _get(scope, path, lambda: inference.model_config(*_model(path[:-1])), request_id)
            case ["models", _] | ["models", _, "versions", _]:
                return _get(scope, path, lambda: inference.model_metadata(*_model(path)), request_id)
            case ["repository", "index"]:
                _only("POST", scope, path)
                body = await read_body(scope["headers"], receive, inference.scoring.limits)
                try:
                    ready_only = _IndexRequest.model_validate_json(body or b"{}").ready
                except ValidationError as error:
                    raise first_error(error) from None
                return json_answer(200, request_id, inference.repository_index(ready_only), "ok")
        raise _NoRoute("route", "/v2/" + "/".join(path), "one of the protocol's that this server has (see /docs)")


def error_answer(error: DPIFrameError, request_id: str) -> Answer:
    """An error in the protocol's form: the status, headers and message are those of every other route."""
    ours = answers.error_answer(error, request_id)
    extra = tuple(h for h in ours.headers if h[0] in _PASSED_ON)
    if isinstance(error, _WrongMethod):
        extra = ((b"allow", error.allowed.encode()),)
    return json_answer(ours.status, request_id, {"error": str(error)}, ours.outcome, extra)


def internal_error(request_id: str) -> Answer:
    return plain_error(500, "internal", answers.internal_message(request_id), request_id)


def plain_error(status: int, code: str, message: str, request_id: str) -> Answer:
    """As `answers.plain_error`, in the protocol's form."""
    return json_answer(status, request_id, {"error": message}, code)


def scores_answer(served: ServedModel, request: InferRequest, job: Job, scores: Floats) -> Answer:
    """The answer to a scored request. `scores` is float32[n, tasks], all finite."""
    info = served.info
    if not wants_binary(request):
        output = {"name": SCORES, "datatype": "FP32", "shape": list(scores.shape), "data": scores.reshape(-1).tolist()}
        named = {"model_name": info.name, "model_version": info.version} | ({"id": request.id} if request.id else {})
        envelope = named | {"parameters": answer_parameters(job), "outputs": [output]}
        return json_answer(200, job.request_id, envelope, "ok")
    raw = scores.tobytes()
    before, after = around_times(served, request, job, *scores.shape)
    times = f'"queue_ms":{job.queue_ms:.3f},"encode_ms":{job.encode_ms:.3f},"device_ms":{job.device_ms:.3f}'
    header = f"{before}{times}{after}".encode()
    headers = (
        BINARY_TYPE,
        (ENVELOPE_LENGTH, b"%d" % len(header)),
        (b"content-length", b"%d" % (len(header) + len(raw))),
        (b"x-request-id", job.request_id.encode("ascii")),
    )
    return Answer(200, headers, header + raw, "ok")


def wants_binary(request: InferRequest) -> bool:
    """Whether its scores are to follow the envelope of its answer."""
    if request.outputs and (asked := request.outputs[0].parameters.binary_data) is not None:
        return asked
    return request.parameters.binary_data_output


def around_times(served: ServedModel, request: InferRequest, job: Job, rows: int, tasks: int) -> tuple[str, str]:
    """What stands before and behind the times in the envelope of an answer in binary form.

    As `answer_parameters` has it, but by hand: pydantic's way takes three times as long.
    """
    degraded = f'"degraded_rows":{job.degraded_rows},' if job.degraded_rows else ""
    named = _named(served.info.name, served.info.version, request.id)
    return (
        f'{named}"parameters":{{"oov_count":{job.oov_count},{degraded}',
        f'}},"outputs":[{{"name":"{SCORES}","datatype":"FP32","shape":[{rows},{tasks}],'
        f'"parameters":{{"binary_data_size":{4 * rows * tasks}}}}}]}}',
    )


@lru_cache(64)
def _named(model: str, version: str, of_request: str) -> str:
    """How the JSON of an answer begins."""
    named = {"model_name": model, "model_version": version} | ({"id": of_request} if of_request else {})
    return to_json(named).decode()[:-1] + ","


def _steps(scope: Scope) -> list[str]:
    """The path below `/v2`, split. ASGI has decoded it; names of models have no slash."""
    root = scope.get("root_path", "")
    path: str = scope["path"].removeprefix(root)
    if path == "/v2" or path.startswith("/v2/"):  # called without a mount
        path = path[3:]
    return path.strip("/").split("/") if path.strip("/") else []


def _model(path: list[str]) -> tuple[str, str]:
    """(name, version or "") of models/NAME[/versions/VERSION]."""
    if len(path) == 4 and path[2] != "versions":
        raise _NoRoute("route", "/v2/" + "/".join(path), "models/NAME/versions/VERSION")
    return path[1], path[3] if len(path) == 4 else ""


def _only(method: str, scope: Scope, path: list[str]) -> list[str]:
    got: str = scope["method"]
    if got != method:
        raise _WrongMethod(got, method, path)
    return path


def _get(scope: Scope, path: list[str], ask: Callable[[], dict[str, Any]], request_id: str) -> Answer:
    _only("GET", scope, path)
    return json_answer(200, request_id, ask(), "ok")


def _or_503(ready: bool, what: str) -> bool:
    if not ready:
        raise Unavailable(f"{what}: got not ready, expected ready")
    return True
