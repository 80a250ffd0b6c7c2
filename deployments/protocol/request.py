"""The inference request of the Open Inference Protocol: a JSON envelope that pydantic checks first, and the tensors after it.

Owns names, shapes, datatypes, byte counts and parameters. Knows no model: which tensors it takes is for `input`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.protocol.tensors import Tensor, check_size, flattened
from deployments.scoring.faults import Words, first_error
from dpiframe_core.errors import InputError
from dpiframe_core.features.preencoded import SectionPlan
from kernels.runtime.gc_pause import gc_paused

# As in `bodies`: unknown keys are collected and refused by name, one at a time.
_STRICT = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)
_COLLECT_BELOW_BYTES = 65_536
_NAMES_SHOWN = 64
_KEPT_ENVELOPES, _KEPT_BYTES = 256, 16_384  # so many, of at most so many bytes each,
_KEPT_TENSOR_BYTES = 1 << 20  # and over tensors of at most so many: for larger ones an envelope costs little beside them

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


@dataclass(slots=True, eq=False)
class InferRequest:
    """A request whose envelope is sound and whose tensors have the bytes that it promised.

    Attributes:
        values: how many of its values Python must read one by one: text, and JSON's.
        form, data: of one whose envelope is known, and the bytes of all its tensors.
    """

    id: str
    parameters: Parameters
    outputs: list[Output]
    values: int
    given: dict[str, Tensor] | None
    form: "Form | None" = None
    data: memoryview | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        if self.given is None:
            assert self.form is not None
            assert self.data is not None
            self.given = self.form.tensors(self.data)
        return self.given

    @property
    def deadline_ms(self) -> float | None:
        if self.parameters.deadline_ms is not None:
            return self.parameters.deadline_ms
        return None if self.parameters.timeout is None else self.parameters.timeout / 1e3


def parse(body: bytes, header_length: str | None) -> InferRequest:
    """A request from a REST body. `header_length`: the header `Inference-Header-Content-Length`; without it, all is JSON.

    Raises:
        NotJson: the envelope is not JSON.
        InputError: it breaks a rule, or the bytes after it are not what it says.
    """
    size = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 12 and int(header_length) <= size):
            rule = f"the envelope's bytes, 0 to {size}"
            raise InputError("Inference-Header-Content-Length", header_length, rule)
        size = int(header_length)
    if size == len(body):
        with gc_paused() if size >= _COLLECT_BELOW_BYTES else nullcontext():
            return _cut(_envelope(body), memoryview(body), size)
    if size > _KEPT_BYTES:
        return _cut(_envelope(body[:size]), memoryview(body), size)
    form = _form(body[:size])
    form.met += 1
    if form.met == 2:
        form.check()
    if form.ends and size + form.ends[-1] == len(body):
        return form.over(memoryview(body)[size:])
    return _cut(form.envelope, memoryview(body), size)


def _envelope(text: bytes) -> Envelope:
    try:
        return Envelope.model_validate_json(text)
    except ValidationError as error:
        raise first_error(error) from None


def _cut(envelope: Envelope, body: memoryview, at: int) -> InferRequest:
    """The request whose tensors' bytes begin at byte `at` of the body."""
    size = at
    raw: list[memoryview | None] = []
    for given in envelope.inputs:
        count = given.parameters.binary_data_size
        raw.append(None if count is None else body[at : at + count])
        at += count or 0
        if at > len(body):
            got = f"{len(raw[-1] or b'')} bytes left"
            raise InputError(f"inputs.{given.name}.parameters.binary_data_size", count, f"as many bytes as follow; {got}")
    if at != len(body):
        raise InputError("body", len(body) - size, f"{at - size} bytes after the envelope, as its binary_data_size add up to")
    return checked(envelope, raw)


@dataclass(slots=True, eq=False)
class Form:
    """A client's envelope, which is the same to the byte as long as it sends so many rows: sound, and checked once.

    Attributes:
        ends: the last byte of each tensor, counted from the envelope's end; none if its requests are to be checked anew.
        plan: what the model that was last asked makes of it, and which model that was. Filled by `input`.
        met: requests that had it. One alone is not worth preparing for: where texts are sent, nearly every envelope is new.
    """

    envelope: Envelope
    request: InferRequest | None = None
    ends: tuple[int, ...] = ()
    plan: tuple[object, SectionPlan] | None = None
    met: int = 0

    def check(self) -> None:
        """Prepares for the next requests of this form, unless they are to be checked anew."""
        sizes = [given.parameters.binary_data_size for given in self.envelope.inputs]
        ends = tuple(accumulate(size or 0 for size in sizes))
        if None in sizes or ends[-1] > _KEPT_TENSOR_BYTES:
            return
        try:
            request = _cut(self.envelope, memoryview(bytes(ends[-1])), 0)
        except InputError:  # whoever sends it is told, with the bytes that came
            return
        bare = {name: tensor._replace(data=b"") for name, tensor in request.tensors.items()}  # the zeros are not kept
        self.request, self.ends = replace(request, given=bare), ends

    def over(self, data: memoryview) -> InferRequest:
        """The same request over other bytes, as many."""
        known = self.request
        assert known is not None
        return InferRequest(known.id, known.parameters, known.outputs, known.values, None, self, data)

    def tensors(self, data: memoryview) -> dict[str, Tensor]:
        assert self.request is not None
        at, tensors = 0, {}
        for (name, datatype, shape, _), end in zip(self.request.tensors.values(), self.ends, strict=True):
            tensors[name] = Tensor(name, datatype, shape, data[at:end])
            at = end
        return tensors


@lru_cache(_KEPT_ENVELOPES)
def _form(text: bytes) -> Form:
    return Form(_envelope(text))


def checked(envelope: Envelope, raw: Sequence[memoryview | bytes | None]) -> InferRequest:
    """The request, given each input's bytes (None for one with `data`).

    Raises:
        InputError: a key is unknown, a name comes twice, or values do not fit a shape.
    """
    _refuse_unknown("", envelope)
    _refuse_unknown("parameters.", envelope.parameters, "; Triton's own extensions are not supported")
    tensors: dict[str, Tensor] = {}
    for given, data in zip(envelope.inputs, raw, strict=True):
        where = f"inputs.{given.name}."
        if given.model_extra or given.parameters.model_extra:
            _refuse_unknown(where, given)
            _refuse_unknown(f"{where}parameters.", given.parameters, "; tensors travel in the body only")
        if given.name in tensors:
            raise InputError("inputs", given.name, "each name once")
        if (data is None) == (given.data is None):
            got = "neither" if data is None else "both"
            raise InputError(f"inputs.{given.name}", Words(got), "either data or parameters.binary_data_size")
        values = data if given.data is None else flattened(given.data, len(given.shape))
        assert values is not None
        tensors[given.name] = tensor = Tensor(given.name, given.datatype, tuple(given.shape), values)
        check_size(tensor)
    for output in envelope.outputs:
        _refuse_unknown(f"outputs.{output.name}.", output)
        _refuse_unknown(f"outputs.{output.name}.parameters.", output.parameters)
    read_by_one = sum(prod(t.shape) for t in tensors.values() if t.datatype == "BYTES" or isinstance(t.data, list))
    return InferRequest(envelope.id, envelope.parameters, envelope.outputs, read_by_one, tensors)


def _refuse_unknown(where: str, model: BaseModel, hint: str = "") -> None:
    for name in model.model_extra or ():
        rule = f"one of {', '.join(type(model).model_fields)}{hint}"
        raise InputError(where + name[:_NAMES_SHOWN], Words("an unknown key"), rule)
