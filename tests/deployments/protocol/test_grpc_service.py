"""The protocol over gRPC, by messages: the field numbers, what its clients never send, and every status."""

import asyncio
import gzip
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from deployments.client.columns import encoded_texts
from deployments.protocol.grpc_messages import CLASSES, METHODS, SERVICE
from deployments.protocol.grpc_service import _DATA_TYPES, GrpcMethods
from tests.deployments.live_app import LIMITS, LiveApp, wait_until
from tests.deployments.serving_doubles import FakeEngine

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def live() -> Iterator[LiveApp]:
    with LiveApp() as app:
        yield app


@pytest.fixture(scope="module")
def channel(live: LiveApp) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(live.grpc_address) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, request: Any = b"", **how: Any) -> Any:
    data = request if isinstance(request, bytes) else request.SerializeToString()
    raw = channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=20, **how)
    return CLASSES[f"{method}Response"].FromString(raw)


def refused(channel: grpc.Channel, method: str, request: Any, code: grpc.StatusCode, message: str) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, method, request)
    assert caught.value.code() == code, caught.value.details()
    assert caught.value.details().startswith(message), caught.value.details()
    return caught.value


def infer(rows: int = 2, first: int = 0) -> Any:
    """Raw contents for every input."""
    request = CLASSES["ModelInferRequest"](model_name="fake", id="a")
    for name, datatype, shape, data in (
        ("user", "INT64", [1], np.int64([7]).tobytes()),
        ("item", "INT64", [rows], np.arange(first, first + rows).tobytes()),
        ("site", "BYTES", [rows], encoded_texts([b"ab"] * rows)),
        ("tags", "BYTES", [rows, 2], encoded_texts([b"x", b"y"] * rows)),
        ("price", "FP32", [rows], np.ones(rows, np.float32).tobytes()),
        ("bias", "FP32", [rows], np.full(rows, 0.25, np.float32).tobytes()),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    return request


def typed(rows: int = 2) -> Any:
    """Typed contents for every input."""
    request = CLASSES["ModelInferRequest"](model_name="fake")
    for name, datatype, shape, contents in (
        ("user", "INT32", [1], {"int_contents": [7]}),
        ("item", "UINT64", [rows], {"uint64_contents": range(rows)}),
        ("site", "BYTES", [rows], {"bytes_contents": [b"ab"] * rows}),
        ("tags", "BYTES", [rows, 2], {"bytes_contents": [b"x", b"y"] * rows}),
        ("price", "FP64", [rows], {"fp64_contents": [1.0] * rows}),
        ("bias", "FP32", [rows], {"fp32_contents": [0.25] * rows}),
        ("bias:missing", "BOOL", [rows], {"bool_contents": [False] * rows}),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=shape, contents=contents)
    return request


def scores(response: Any) -> list[float]:
    [output], [raw] = response.outputs, response.raw_output_contents
    assert (output.name, output.datatype, list(output.shape)) == ("scores", "FP32", [len(raw) // 4, 1])
    return np.frombuffer(raw, np.float32).tolist()


def expected(rows: int = 2, first: int = 0) -> list[float]:
    return [float(np.float32(first + i) / np.float32(1000) + np.float32(0.25)) for i in range(rows)]


def test_messages_are_those_of_the_reference_client() -> None:
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2", reason="tritonclient is not installed").DESCRIPTOR
    config = pytest.importorskip("tritonclient.grpc.model_config_pb2").DESCRIPTOR
    known = [m for file in (theirs, config) for m in all_messages(file.message_types_by_name.values())]
    reference = {m.full_name: m for m in known}
    for name, ours in CLASSES.items():
        fields = {(f.name, f.number, f.type, f.is_repeated) for f in ours.DESCRIPTOR.fields}
        numbers = {FieldDescriptor.TYPE_ENUM: FieldDescriptor.TYPE_INT32}  # the same bytes
        wanted = {(f.name, f.number, numbers.get(f.type, f.type), f.is_repeated) for f in reference[f"inference.{name}"].fields}
        if name in ("ModelConfig", "ModelInput", "ModelOutput"):  # of which a client needs little
            wanted = {field for field in wanted if field[0] in {f.name for f in ours.DESCRIPTOR.fields}}
        left_out = {"memory_usage", "response_stats"}
        assert fields == {field for field in wanted if field[0] not in left_out}, name
    types = config.enum_types_by_name["DataType"].values_by_name
    assert {types[name].number: name for name in _DATA_TYPES} == {number: name for name, number in _DATA_TYPES.items()}
    service = theirs.services_by_name["GRPCInferenceService"]
    assert service.full_name == SERVICE
    for method in METHODS:
        described = service.methods_by_name[method]
        assert (described.input_type.name, described.output_type.name) == (f"{method}Request", f"{method}Response")


def all_messages(messages: Any) -> Iterator[Any]:
    for message in messages:
        yield message
        yield from all_messages(message.nested_types)


def test_raw_and_typed_contents_score_alike(channel: grpc.Channel) -> None:
    answer = call(channel, "ModelInfer", infer(3, 5))
    assert scores(answer) == expected(3, 5)
    assert (answer.model_name, answer.model_version, answer.id) == ("fake", "7", "a")
    assert scores(call(channel, "ModelInfer", typed())) == expected()
    assert scores(call(channel, "ModelInfer", infer(200), compression=grpc.Compression.Gzip)) == expected(200)


def changed(**keys: Any) -> Any:
    """A request whose second input, `item`, has other keys."""
    request = infer()
    for key, value in keys.items():
        if key == "shape":
            del request.inputs[1].shape[:]
            request.inputs[1].shape.extend(value)
        else:
            setattr(request.inputs[1], key, value)
    return request


def without_contents() -> Any:
    request = infer()
    del request.raw_input_contents[:]
    return request


def with_both() -> Any:
    request = infer()
    request.inputs[0].contents.int64_contents.append(1)
    return request


def other_contents() -> Any:
    request = typed()
    request.inputs[1].contents.fp32_contents.append(1.0)
    return request


def bad_text() -> Any:
    request = typed()
    request.inputs[2].contents.bytes_contents[1] = b"\xff"
    return request


def parameter(name: str, **value: Any) -> Any:
    request = infer()
    request.parameters[name].CopyFrom(CLASSES["InferParameter"](**value))
    return request


def one_less() -> Any:
    request = infer()
    del request.raw_input_contents[-1]
    return request


def claimed() -> Any:
    """Far more rows than the message has bytes, as none of them has a value."""
    request = typed()
    request.inputs[3].shape[:] = [10**9, 0]
    request.inputs[3].contents.Clear()
    return request


RUDE: list[tuple[str, Any, grpc.StatusCode, str]] = [
    ("bytes", b"\xff\xfe\x00", INVALID, "message: got 3 bytes that are none, expected a ModelInferRequest"),
    ("no model", CLASSES["ModelInferRequest"](), grpc.StatusCode.NOT_FOUND, "model: got '', expected one of ['fake']"),
    ("no inputs", CLASSES["ModelInferRequest"](model_name="fake"), INVALID, "inputs: got a list of 0 values, expected at"),
    ("a negative shape", changed(shape=[-1]), INVALID, "inputs[1].shape[0]: got -1, expected greater than or equal to 0"),
    ("no shape", changed(shape=[]), INVALID, "inputs[1].shape: got a list of 0 values, expected at least one"),
    ("another shape", changed(shape=[3]), INVALID, "inputs.item: got 16, expected 24 bytes, as INT64 [3] has"),
    ("another datatype", changed(datatype="INT128"), INVALID, "inputs[1].datatype: got 'INT128', expected 'BOOL'"),
    ("another name", changed(name="user"), INVALID, "inputs: got 'user', expected each name once"),
    ("an unknown name", changed(name="x"), INVALID, "inputs: got 'x', expected a feature of the model"),
    ("no values", without_contents(), INVALID, "inputs.user.data: got 0, expected 1 values, as shape [1] says"),
    ("values twice", with_both(), INVALID, "inputs.user.contents: got values, expected none, as there are raw_input_contents"),
    ("values of another kind", other_contents(), INVALID,
     "inputs.item.contents: got fp32_contents, expected uint64_contents, as its datatype is UINT64"),
    ("text that is none", bad_text(), INVALID, "inputs.site.contents.bytes_contents: got b'\\xff', expected text in UTF-8"),
    ("raw contents lack", one_less(), INVALID, "raw_input_contents: got 5, expected 6, one for each input"),
    ("an unknown parameter", parameter("x", int64_param=1), INVALID, "parameters.x: got an unknown key, expected one of"),
    ("an empty parameter", parameter("encoded"), INVALID, "parameters.encoded: got null, expected"),
    ("a parameter of text", parameter("priority", string_param="1"), INVALID, "parameters.priority: got '1', expected an"),
    ("rows without values", claimed(), INVALID, "inputs: got 1000000000, expected at most 500 rows"),
    ("too many rows", infer(501), INVALID, "inputs: got 501, expected at most 500 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "code", "message"), [case[1:] for case in RUDE], ids=[case[0] for case in RUDE])
def test_a_rude_message_is_refused_in_words(channel: grpc.Channel, request_: Any, code: grpc.StatusCode, message: str) -> None:
    refused(channel, "ModelInfer", request_, code, message)
    assert scores(call(channel, "ModelInfer", infer())) == expected()


@pytest.mark.parametrize("method", [m for m in METHODS if m != "ModelInfer"])
def test_garbage_for_any_method_is_refused(channel: grpc.Channel, method: str) -> None:
    refused(channel, method, b"\xff\xfe\x00", INVALID, f"message: got 3 bytes that are none, expected a {method}Request")


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelStreamInfer")(b"", timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_bomb_is_stopped_at_the_bound_on_messages(channel: grpc.Channel) -> None:
    request = infer()
    request.raw_input_contents[0] = bytes(40_000_000)
    assert len(gzip.compress(request.SerializeToString())) < LIMITS.max_body_bytes
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, "ModelInfer", request, compression=grpc.Compression.Gzip)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert scores(call(channel, "ModelInfer", infer())) == expected()


def test_a_full_queue_tells_grpcs_own_retry_policy_when_to_come_back() -> None:
    engine = FakeEngine()
    engine.go.clear()
    with LiveApp(engine, max_queued_rows=500) as live, grpc.insecure_channel(live.grpc_address) as channel:
        send = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        waiting, batcher = [], live.batchers["fake"]
        for rows, in_flight, queued in ((64, 64, 0), (450, 64, 450)):  # else the larger one may come first, and fill the batch
            waiting.append(send.future(infer(rows).SerializeToString()))
            wait_until(
                lambda want=(in_flight, queued): (batcher.dispatcher.inflight_rows, batcher.dispatcher.queued_rows) == want
            )
        error: Any = refused(
            channel, "ModelInfer", infer(100), grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: got 450 rows waiting"
        )
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1
        waiting[1].cancel()
        wait_until(lambda: not batcher.dispatcher.queued_rows)
        engine.go.set()
        assert scores(CLASSES["ModelInferResponse"].FromString(waiting[0].result(20))) == expected(64)


class FromAfar:
    """The context of a call whose client is on another host, or on this one."""

    def __init__(self, peer: str) -> None:
        self.code: grpc.StatusCode | None = None
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> Any:
        return (("x-request-id", "abc"), ("x-bin", b"\xff"))

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        raise AssertionError(metadata)


@pytest.mark.parametrize(
    ("peer", "welcome"),
    [
        ("ipv4:127.0.0.1:50000", True),
        ("ipv4:127.0.0.2:50000", True),
        ("ipv6:[::1]:50000", True),
        ("ipv6:%5B::1%5D:50000", True),
        ("ipv6:[::ffff:127.0.0.1]:50000", True),
        ("ipv4:10.0.0.7:50000", False),
        ("ipv6:[2001:db8::1]:50000", False),
        ("ipv6:[::ffff:10.0.0.7]:50000", False),
        ("", False),
    ],
)
def test_a_service_on_loopback_turns_calls_from_elsewhere_away(live: LiveApp, peer: str, welcome: bool) -> None:
    methods = GrpcMethods()
    methods.inference = live.inference
    for method in (methods.ServerLive, methods.ModelInfer):
        context = FromAfar(peer)
        asyncio.run(method(b"", context))
        if method == methods.ServerLive and welcome:
            assert context.code is None
        elif welcome:
            assert context.code == grpc.StatusCode.NOT_FOUND  # it names no model
        else:
            assert context.code == grpc.StatusCode.PERMISSION_DENIED
            assert context.details == f"peer: got {peer}, expected one on loopback, as http.host is 127.0.0.1"
    methods.loopback_only = False
    context = FromAfar(peer)
    asyncio.run(methods.ServerLive(b"", context))
    assert context.code is None


@given(data=st.data())
def test_a_damaged_message_is_never_a_fault_of_ours(channel: grpc.Channel, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from([infer(), typed()])).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    try:
        call(channel, "ModelInfer", bytes(content))
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
    else:
        return
    assert code in (INVALID, grpc.StatusCode.NOT_FOUND), details
