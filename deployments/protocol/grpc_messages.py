"""The messages of `inference.GRPCInferenceService` as classes, made from the field numbers that the protocol fixes.

Made at import in a descriptor pool of their own: generated code would tie us to one version of protobuf, and its names would
collide with those that a client library registers in the same process.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
METHODS = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelInfer",
    "ModelStatistics", "RepositoryIndex",
)  # fmt: skip

_PARAMETERS = "map InferParameter"
# Message -> field -> (number, type). "N*" is a repeated N, "map N" a map from text to N, "N?" a member of the message's oneof.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "InferParameter": {
        "bool_param": (1, "bool?"), "int64_param": (2, "int64?"), "string_param": (3, "string?"),
        "double_param": (4, "double?"), "uint64_param": (5, "uint64?"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "bool*"), "int_contents": (2, "int32*"), "int64_contents": (3, "int64*"),
        "uint_contents": (4, "uint32*"), "uint64_contents": (5, "uint64*"), "fp32_contents": (6, "float*"),
        "fp64_contents": (7, "double*"), "bytes_contents": (8, "bytes*"),
    },
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "string*")},
    "ModelMetadataRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelMetadataResponse.TensorMetadata": {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "int64*")},
    "ModelMetadataResponse": {
        "name": (1, "string"), "versions": (2, "string*"), "platform": (3, "string"),
        "inputs": (4, "ModelMetadataResponse.TensorMetadata*"), "outputs": (5, "ModelMetadataResponse.TensorMetadata*"),
    },
    "ModelConfigRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelInput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (4, "int64*")},  # on the wire as an enum
    "ModelOutput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (3, "int64*")},
    "ModelConfig": {
        "name": (1, "string"), "platform": (2, "string"), "max_batch_size": (4, "int32"), "input": (5, "ModelInput*"),
        "output": (6, "ModelOutput*"),
    },
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelInferRequest.InferInputTensor": {
        "name": (1, "string"), "datatype": (2, "string"), "shape": (3, "int64*"), "parameters": (4, _PARAMETERS),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferRequest.InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, _PARAMETERS)},
    "ModelInferRequest": {
        "model_name": (1, "string"), "model_version": (2, "string"), "id": (3, "string"), "parameters": (4, _PARAMETERS),
        "inputs": (5, "ModelInferRequest.InferInputTensor*"),
        "outputs": (6, "ModelInferRequest.InferRequestedOutputTensor*"), "raw_input_contents": (7, "bytes*"),
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": (1, "string"), "datatype": (2, "string"), "shape": (3, "int64*"), "parameters": (4, _PARAMETERS),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"), "model_version": (2, "string"), "id": (3, "string"), "parameters": (4, _PARAMETERS),
        "outputs": (5, "ModelInferResponse.InferOutputTensor*"), "raw_output_contents": (6, "bytes*"),
    },
    "ModelStatisticsRequest": {"name": (1, "string"), "version": (2, "string")},
    "StatisticDuration": {"count": (1, "uint64"), "ns": (2, "uint64")},
    "InferStatistics": {
        "success": (1, "StatisticDuration"), "fail": (2, "StatisticDuration"), "queue": (3, "StatisticDuration"),
        "compute_input": (4, "StatisticDuration"), "compute_infer": (5, "StatisticDuration"),
        "compute_output": (6, "StatisticDuration"), "cache_hit": (7, "StatisticDuration"),
        "cache_miss": (8, "StatisticDuration"),
    },
    "InferBatchStatistics": {
        "batch_size": (1, "uint64"), "compute_input": (2, "StatisticDuration"), "compute_infer": (3, "StatisticDuration"),
        "compute_output": (4, "StatisticDuration"),
    },
    "ModelStatistics": {
        "name": (1, "string"), "version": (2, "string"), "last_inference": (3, "uint64"), "inference_count": (4, "uint64"),
        "execution_count": (5, "uint64"), "inference_stats": (6, "InferStatistics"),
        "batch_stats": (7, "InferBatchStatistics*"),
    },
    "ModelStatisticsResponse": {"model_stats": (1, "ModelStatistics*")},
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "RepositoryIndexResponse.ModelIndex": {
        "name": (1, "string"), "version": (2, "string"), "state": (3, "string"), "reason": (4, "string"),
    },
    "RepositoryIndexResponse": {"models": (1, "RepositoryIndexResponse.ModelIndex*")},
}  # fmt: skip

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Mapping[str, Any] = {
    "bool": _Field.TYPE_BOOL, "int32": _Field.TYPE_INT32, "int64": _Field.TYPE_INT64, "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64, "float": _Field.TYPE_FLOAT, "double": _Field.TYPE_DOUBLE, "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}  # fmt: skip


def _typed(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".inference.{kind}"


def _fill(message: Any, path: str, fields: Mapping[str, tuple[int, str]]) -> None:
    for name, (number, kind) in fields.items():
        field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
        if kind.startswith("map "):
            entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
            entry.options.map_entry = True
            _typed(entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), "string")
            _typed(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind.removeprefix("map "))
            field.label = _Field.LABEL_REPEATED
            _typed(field, f"{path}.{entry.name}")
            continue
        if kind.endswith("*"):
            field.label = _Field.LABEL_REPEATED
        if kind.endswith("?"):
            if not message.oneof_decl:
                message.oneof_decl.add(name="parameter_choice")
            field.oneof_index = 0
        _typed(field, kind.rstrip("*?"))


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="dpiframe/inference.proto", package="inference", syntax="proto3")
    made: dict[str, Any] = {}
    for path in sorted(_MESSAGES, key=lambda path: path.count(".")):  # a message before those inside it
        outer, _, name = path.rpartition(".")
        made[path] = (made[outer].nested_type if outer else file.message_type).add(name=name)
        _fill(made[path], path, _MESSAGES[path])
    return file


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in _MESSAGES}


CLASSES: Mapping[str, Any] = _classes()
