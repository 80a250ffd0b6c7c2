"""The Open Inference Protocol over gRPC: the methods of `inference.GRPCInferenceService`, for Serve's ingress or any server.

Owns the messages' meaning and the statuses of errors. Knows no Ray: a Serve deployment inherits `GrpcMethods`.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from deployments.access.gate import Gate
from deployments.access.tokens import Scope
from deployments.http_api import answers
from deployments.protocol.envelope import Envelope
from deployments.protocol.grpc_messages import CLASSES, METHODS, SERVICE
from deployments.protocol.inference import SCORES, Inference, answer_parameters
from deployments.protocol.request import InferRequest, checked
from deployments.scoring.faults import Words, first_error
from dpiframe_core.errors import DPIFrameError, InputError, ModelNotFound, Overloaded
from dpiframe_core.features.row_block import Floats

log = logging.getLogger(__name__)

# By the HTTP status that our errors have.
_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "ipv6:%5B::ffff:127.", "unix:")
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip

_DATA_TYPES = {"TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_STRING": 13}  # of Triton's model_config.proto


class _Elsewhere(DPIFrameError):
    """Serve's replicas listen for gRPC on every interface; this call did not come through the proxy on loopback."""

    status = 403
    code = "not_on_loopback"


class Context(Protocol):
    """What is needed of a call; Serve's and gRPC's own contexts both have it."""

    def peer(self) -> str: ...
    def invocation_metadata(self) -> Any: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, metadata: Any) -> None: ...


class GrpcMethods:
    """The service's methods by name, as Serve calls them. A deployment sets the attributes once its models are there."""

    inference: Inference
    loopback_only: bool = True
    gate: Gate | None = None

    async def ServerLive(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802 (these names are the protocol's)
        return self._answered("ServerLive", request, grpc_context, lambda _: {"live": True})

    async def ServerReady(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802
        return self._answered("ServerReady", request, grpc_context, lambda _: {"ready": self.inference.server_ready()})

    async def ModelReady(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802
        def ready(asked: Any) -> dict[str, bool]:
            try:
                return {"ready": self.inference.model_ready(asked.name, asked.version)}
            except ModelNotFound:  # an answer here; over REST it is 404
                return {"ready": False}

        return self._answered("ModelReady", request, grpc_context, ready)

    async def ServerMetadata(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802
        return self._answered("ServerMetadata", request, grpc_context, lambda _: self.inference.server_metadata())

    async def ModelMetadata(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802
        metadata = self.inference.model_metadata
        return self._answered("ModelMetadata", request, grpc_context, lambda asked: metadata(asked.name, asked.version))

    async def ModelConfig(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802
        def config(asked: Any) -> dict[str, Any]:
            found = self.inference.model_config(asked.name, asked.version)
            for tensor in (*found["input"], *found["output"]):
                tensor["data_type"] = _DATA_TYPES[tensor["data_type"]]
            return {"config": found}

        return self._answered("ModelConfig", request, grpc_context, config)

    async def ModelStatistics(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802
        statistics = self.inference.model_statistics
        return self._answered("ModelStatistics", request, grpc_context, lambda asked: statistics(asked.name, asked.version))

    async def RepositoryIndex(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802
        index = self.inference.repository_index
        return self._answered("RepositoryIndex", request, grpc_context, lambda asked: {"models": index(asked.ready)})

    async def ModelInfer(self, request: bytes, grpc_context: Context) -> Any:  # noqa: N802
        inference, response = self.inference, CLASSES["ModelInferResponse"]
        headers = _headers(grpc_context)
        job = inference.scoring.begin(answers.request_id_of(headers), headers)
        outcome = "cancelled"
        try:
            self._let_in(grpc_context, "score")
            inference.scoring.over(job, "receive")
            message = _message("ModelInferRequest", request)
            asked = message.model_name, message.model_version
            inference.find(job, *asked)
            parsed = read(message)
            served, scores = await inference.infer(job, *asked, parsed, len(request))
            outcome = "ok"
            info = served.info
            return _scores(response(model_name=info.name, model_version=info.version, id=parsed.id), job, scores)
        except DPIFrameError as error:
            outcome = error.code
            _refuse(grpc_context, error)
        except Exception:
            outcome = "internal"
            log.exception("request %s failed", job.request_id, extra={"request_id": job.request_id})
            _set(grpc_context, grpc.StatusCode.INTERNAL, answers.internal_message(job.request_id))
        finally:
            inference.scoring.finish(job, outcome)
        return response()

    def _let_in(self, context: Context, scope: Scope | None = None) -> None:
        _require_loopback(self.loopback_only, context)
        if self.gate is not None:
            self.gate.require(_headers(context), scope)

    def _answered(self, method: str, request: bytes, context: Context, answer: Callable[[Any], Mapping[str, Any]]) -> Any:
        made = CLASSES[f"{method}Response"]
        try:
            self._let_in(context)
            return made(**answer(_message(f"{method}Request", request)))
        except DPIFrameError as error:
            _refuse(context, error)
        except Exception:
            log.exception("%s failed", method)
            _set(context, grpc.StatusCode.INTERNAL, "server: got an unexpected error, expected none; its log has it")
        return made()  # never seen: a call that ends in an error has no message


def add_to_server(methods: GrpcMethods, server: Any) -> None:
    """Registers the service. Serve imports this by name, and calls it with a stand-in for `methods`."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(methods, name),
            request_deserializer=None,  # each method reads its message itself: gRPC answers INTERNAL for one that is damaged
            response_serializer=CLASSES[f"{name}Response"].SerializeToString,
        )
        for name in METHODS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _message(name: str, data: bytes) -> Any:
    try:
        return CLASSES[name].FromString(data)
    except DecodeError:
        raise InputError("message", Words(f"{len(data)} bytes that are none"), f"a {name}") from None


def read(request: Any) -> InferRequest:
    """A request from its message.

    Raises:
        InputError: it breaks a rule of the envelope, or its contents do not fit its inputs.
    """
    raw: list[bytes] = list(request.raw_input_contents)
    inputs = []
    for given in request.inputs:
        one: dict[str, Any] = {"name": given.name, "shape": list(given.shape), "datatype": given.datatype}
        if given.parameters:
            one["parameters"] = _parameters(given.parameters)
        if not raw:
            one["data"] = _contents(given)
        elif given.HasField("contents"):
            raise InputError(f"inputs.{given.name}.contents", Words("values"), "none, as there are raw_input_contents")
        if not raw and given.datatype == "BYTES":
            one["data"] = _texts(one["data"], f"inputs.{given.name}")
        inputs.append(one)
    if raw and len(raw) != len(inputs):
        raise InputError("raw_input_contents", len(raw), f"{len(inputs)}, one for each input")
    outputs = [{"name": o.name, "parameters": _parameters(o.parameters)} for o in request.outputs]
    whole = {"id": request.id, "parameters": _parameters(request.parameters), "inputs": inputs, "outputs": outputs}
    try:
        envelope = Envelope.model_validate(whole)
    except ValidationError as error:
        raise first_error(error) from None
    return checked(envelope, raw or [None] * len(inputs))


def _contents(given: Any) -> list[Any]:
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise InputError(f"inputs.{given.name}", given.datatype, "raw_input_contents for this datatype")
    contents = given.contents
    for other, _ in contents.ListFields():
        if other.name != field:
            raise InputError(
                f"inputs.{given.name}.contents", Words(other.name), f"{field}, as its datatype is {given.datatype}"
            )
    values: list[Any] = list(getattr(contents, field))
    return values


def _texts(values: list[bytes], where: str) -> list[str]:
    try:
        return [str(value, "utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise InputError(f"{where}.contents.bytes_contents", error.object, "text in UTF-8") from None


def _parameters(given: Any) -> dict[str, Any]:
    out = {}
    for name, value in given.items():
        choice = value.WhichOneof("parameter_choice")
        out[name] = None if choice is None else getattr(value, choice)
    return out


def _scores(response: Any, job: Any, scores: Floats) -> Any:
    response.outputs.add(name=SCORES, datatype="FP32", shape=scores.shape)
    response.raw_output_contents.append(scores.tobytes())
    for name, value in answer_parameters(job).items():
        if isinstance(value, int):
            response.parameters[name].int64_param = value
        else:
            response.parameters[name].double_param = value
    return response


def _headers(context: Context) -> list[tuple[bytes, bytes]]:
    """The call's metadata as HTTP's headers."""
    return [(str(key).encode(), value if isinstance(value, bytes) else str(value).encode("utf-8", "replace"))
            for key, value in context.invocation_metadata() or ()]  # fmt: skip


def _require_loopback(loopback_only: bool, context: Context) -> None:
    if loopback_only and not context.peer().startswith(_LOOPBACK):
        raise _Elsewhere(f"peer: got {context.peer()}, expected one on loopback, as http.host is 127.0.0.1")


def _refuse(context: Context, error: DPIFrameError) -> None:
    if isinstance(error, Overloaded):  # what gRPC's own retry policy reads
        context.set_trailing_metadata([("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1e3))))])
    _set(context, _CODES[error.status], str(error))


def _set(context: Context, code: grpc.StatusCode, details: str) -> None:
    context.set_code(code)
    context.set_details(details)
