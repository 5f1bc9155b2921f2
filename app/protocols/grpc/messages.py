"""The messages of the gRPC service of the Open Inference Protocol, from a description of their fields.

The descriptors are in a pool of their own, so that a process may also use Triton's client, which has the same
messages in the default one.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
FILE = "open_inference.proto"

_FIELD = descriptor_pb2.FieldDescriptorProto
KINDS = {
    "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
    "float": _FIELD.TYPE_FLOAT,
    "double": _FIELD.TYPE_DOUBLE,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}

DATA_TYPES = ("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
              "FP16", "FP32", "FP64", "STRING", "BF16")  # fmt: skip
"""Values of the enumeration `DataType`, from 0."""

# Each field: its name, number and type; "*" is repeated, "%" a map from strings, "|" a member of a oneof.
MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "ServerLiveRequest": [],
    "ServerLiveResponse": [("live", 1, "bool")],
    "ServerReadyRequest": [],
    "ServerReadyResponse": [("ready", 1, "bool")],
    "ModelReadyRequest": [("name", 1, "string"), ("version", 2, "string")],
    "ModelReadyResponse": [("ready", 1, "bool")],
    "ServerMetadataRequest": [],
    "ServerMetadataResponse": [("name", 1, "string"), ("version", 2, "string"), ("extensions", 3, "*string")],
    "ModelMetadataRequest": [("name", 1, "string"), ("version", 2, "string")],
    "TensorMetadata": [("name", 1, "string"), ("datatype", 2, "string"), ("shape", 3, "*int64")],
    "ModelMetadataResponse": [
        ("name", 1, "string"),
        ("versions", 2, "*string"),
        ("platform", 3, "string"),
        ("inputs", 4, "*TensorMetadata"),
        ("outputs", 5, "*TensorMetadata"),
    ],
    "InferParameter": [
        ("bool_param", 1, "|bool"),
        ("int64_param", 2, "|int64"),
        ("string_param", 3, "|string"),
        ("double_param", 4, "|double"),
        ("uint64_param", 5, "|uint64"),
    ],
    "InferTensorContents": [
        ("bool_contents", 1, "*bool"),
        ("int_contents", 2, "*int32"),
        ("int64_contents", 3, "*int64"),
        ("uint_contents", 4, "*uint32"),
        ("uint64_contents", 5, "*uint64"),
        ("fp32_contents", 6, "*float"),
        ("fp64_contents", 7, "*double"),
        ("bytes_contents", 8, "*bytes"),
    ],
    "InferInputTensor": [
        ("name", 1, "string"),
        ("datatype", 2, "string"),
        ("shape", 3, "*int64"),
        ("parameters", 4, "%InferParameter"),
        ("contents", 5, "InferTensorContents"),
    ],
    "InferRequestedOutputTensor": [("name", 1, "string"), ("parameters", 2, "%InferParameter")],
    "ModelInferRequest": [
        ("model_name", 1, "string"),
        ("model_version", 2, "string"),
        ("id", 3, "string"),
        ("parameters", 4, "%InferParameter"),
        ("inputs", 5, "*InferInputTensor"),
        ("outputs", 6, "*InferRequestedOutputTensor"),
        ("raw_input_contents", 7, "*bytes"),
    ],
    "InferOutputTensor": [
        ("name", 1, "string"),
        ("datatype", 2, "string"),
        ("shape", 3, "*int64"),
        ("parameters", 4, "%InferParameter"),
        ("contents", 5, "InferTensorContents"),
    ],
    "ModelInferResponse": [
        ("model_name", 1, "string"),
        ("model_version", 2, "string"),
        ("id", 3, "string"),
        ("parameters", 4, "%InferParameter"),
        ("outputs", 5, "*InferOutputTensor"),
        ("raw_output_contents", 6, "*bytes"),
    ],
    "RepositoryIndexRequest": [("repository_name", 1, "string"), ("ready", 2, "bool")],
    "ModelIndex": [
        ("name", 1, "string"),
        ("version", 2, "string"),
        ("state", 3, "string"),
        ("reason", 4, "string"),
    ],
    "RepositoryIndexResponse": [("models", 1, "*ModelIndex")],
    "ModelConfigRequest": [("name", 1, "string"), ("version", 2, "string")],
    "ModelInput": [("name", 1, "string"), ("data_type", 2, "DataType"), ("dims", 4, "*int64")],
    "ModelOutput": [("name", 1, "string"), ("data_type", 2, "DataType"), ("dims", 3, "*int64")],
    "ModelConfig": [
        ("name", 1, "string"),
        ("platform", 2, "string"),
        ("max_batch_size", 4, "int32"),
        ("input", 5, "*ModelInput"),
        ("output", 6, "*ModelOutput"),
        ("backend", 17, "string"),
    ],
    "ModelConfigResponse": [("config", 1, "ModelConfig")],
    "ModelStatisticsRequest": [("name", 1, "string"), ("version", 2, "string")],
    "StatisticDuration": [("count", 1, "uint64"), ("ns", 2, "uint64")],
    "InferStatistics": [("success", 1, "StatisticDuration"), ("fail", 2, "StatisticDuration")],
    "ModelStatistics": [
        ("name", 1, "string"),
        ("version", 2, "string"),
        ("inference_count", 4, "uint64"),
        ("execution_count", 5, "uint64"),
        ("inference_stats", 6, "InferStatistics"),
    ],
    "ModelStatisticsResponse": [("model_stats", 1, "*ModelStatistics")],
}
METHODS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer",
           "RepositoryIndex", "ModelConfig", "ModelStatistics")  # fmt: skip


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """Describe the messages and the service."""
    file = descriptor_pb2.FileDescriptorProto(name=FILE, package=PACKAGE, syntax="proto3")
    data_types = file.enum_type.add(name="DataType")
    for number, name in enumerate(DATA_TYPES):
        data_types.value.add(name=f"TYPE_{name}", number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            _add_field(message, name, field_name, number, kind)
    service = file.service.add(name=SERVICE.removeprefix(f"{PACKAGE}."))
    for method in METHODS:
        types = {side: f".{PACKAGE}.{method}{side.capitalize()}" for side in ("request", "response")}
        service.method.add(name=method, input_type=types["request"], output_type=types["response"])
    return file


def _add_field(message: Any, owner: str, name: str, number: int, kind: str) -> None:
    mark, kind = (kind[0], kind[1:]) if kind[0] in "*%|" else ("", kind)
    field = message.field.add(name=name, number=number)
    field.label = _FIELD.LABEL_REPEATED if mark in ("*", "%") else _FIELD.LABEL_OPTIONAL
    if mark == "%":
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        for position, (part, part_kind) in enumerate((("key", "string"), ("value", kind)), start=1):
            _add_field(entry, owner, part, position, part_kind)
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{owner}.{entry_name}"
    elif kind in KINDS:
        field.type = KINDS[kind]
    else:
        field.type = _FIELD.TYPE_ENUM if kind == "DataType" else _FIELD.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0


POOL = descriptor_pool.DescriptorPool()
POOL.Add(file_descriptor())


def message_class(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def count_fields(data: bytes, limit: int) -> int:
    """Count the fields of a message, not those of the messages in it, up to one more than `limit`.

    A field is a tag, whose three lowest bits are the wire type, and a value. Returns -1 if a field ends
    behind the data.
    """
    position = count = 0
    while position < len(data) and count <= limit:
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 0:
            _, position = _varint(data, position)
        elif kind == 2:
            length, position = _varint(data, position)
            position += length
        else:
            position += {1: 8, 5: 4}.get(kind, len(data))
        count += 1
    return count if position <= len(data) else -1


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Read a number of 7 bits a byte, least first, and return the position behind it."""
    value = shift = 0
    while position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    return value, len(data) + 1
