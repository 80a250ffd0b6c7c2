"""The JSON envelope of the Open Inference Protocol's inference request, as pydantic checks it first."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.scoring.faults import first_error

# As in `bodies`: unknown keys are collected and refused by name, one at a time.
_STRICT = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

Dimension = Annotated[int, Field(ge=0, lt=2**31)]
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"
]


class Parameters(BaseModel):
    """Of a request. `deadline_ms` counts from its arrival, `timeout` is the same in microseconds, as Triton's clients send it.

    A higher `priority` is scored first. `encoded`: the tensors hold ids and model-ready numbers, one tensor a feature.
    `binary_data_output`: outputs that say nothing of it themselves come in binary form.
    `key`: whose requests are to be scored by one version, while two of them share a model's.
    """

    model_config = _STRICT

    deadline_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    timeout: Annotated[int, Field(gt=0, le=3_600_000_000)] | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    encoded: bool = False
    binary_data_output: bool = False
    key: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class InputParameters(BaseModel):
    """Of an input. `binary_data_size`: its values are so many bytes after the envelope, not in `data`."""

    model_config = _STRICT

    binary_data_size: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class OutputParameters(BaseModel):
    model_config = _STRICT

    binary_data: bool | None = None


class Input(BaseModel):
    model_config = _STRICT

    name: Annotated[str, Field(min_length=1, max_length=256)]
    shape: Annotated[list[Dimension], Field(min_length=1, max_length=2)]
    datatype: Datatype
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = None


class Output(BaseModel):
    model_config = _STRICT

    name: Annotated[str, Field(min_length=1, max_length=256)]
    parameters: OutputParameters = OutputParameters()


class Envelope(BaseModel):
    """Everything of a request but binary tensors."""

    model_config = _STRICT

    id: Annotated[str, Field(max_length=256)] = ""
    parameters: Parameters = Parameters()
    inputs: Annotated[list[Input], Field(min_length=1, max_length=4096, fail_fast=True)]
    outputs: Annotated[list[Output], Field(max_length=64, fail_fast=True)] = []


def envelope_of(text: bytes) -> Envelope:
    """Raises InputError for what is no such envelope, NotJson for what is no JSON."""
    try:
        return Envelope.model_validate_json(text)
    except ValidationError as error:
        raise first_error(error) from None
