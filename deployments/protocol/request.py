"""The inference request of the Open Inference Protocol: a JSON envelope that pydantic checks first, and the tensors after it.

Owns names, shapes, datatypes, byte counts and parameters. Knows no model: which tensors it takes is for `input`.
"""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod

from pydantic import BaseModel

from deployments.protocol.envelope import Envelope, Output, Parameters, envelope_of
from deployments.protocol.tensors import Tensor, check_size, flattened
from deployments.scoring.faults import Words
from dpiframe_core.errors import InputError
from dpiframe_core.features.preencoded import SectionPlan
from kernels.runtime.gc_pause import gc_paused

_COLLECT_BELOW_BYTES = 65_536
_NAMES_SHOWN = 64
_KEPT_ENVELOPES, _KEPT_BYTES = 256, 16_384  # so many, of at most so many bytes each,
_KEPT_TENSOR_BYTES = 1 << 20  # and over tensors of at most so many: for larger ones an envelope costs little beside them
_SIZE = re.compile(rb'(?<="binary_data_size":)( ?(?:0|[1-9][0-9]{0,9}))(?=[,} \r\n\t])')


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
            return _cut(envelope_of(body), memoryview(body), size)
    if size > _KEPT_BYTES:
        return _cut(envelope_of(body[:size]), memoryview(body), size)
    form = _form(body[:size])
    form.met += 1
    if form.met == 2:
        form.check()
    if form.ends and size + form.ends[-1] == len(body):
        return form.over(memoryview(body)[size:])
    return _cut(form.envelope or envelope_of(body[:size]), memoryview(body), size)


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
        envelope: None of a form that has another's but for its sizes.
        ends: the last byte of each tensor, counted from the envelope's end; none if its requests are to be checked anew.
        plan: what the model that was last asked makes of it, and which model that was. Filled by `input`.
        met: requests that had it. One alone is not worth preparing for.
    """

    envelope: Envelope | None
    request: InferRequest | None = None
    ends: tuple[int, ...] = ()
    plan: tuple[object, SectionPlan] | None = None
    met: int = 0

    def check(self) -> None:
        """Prepares for the next requests of this form, unless they are to be checked anew."""
        if self.envelope is None or self.ends:
            return
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

    def sized(self, sizes: Sequence[int]) -> "Form | None":
        """The same envelope with other sizes, if texts alone have others."""
        self.check()
        if self.request is None:
            return None
        before = zip(self.request.tensors.values(), self.ends, (0, *self.ends), strict=False)
        for (tensor, end, start), size in zip(before, sizes, strict=True):
            if size != end - start and tensor.datatype != "BYTES":
                return None
        return Form(None, self.request, tuple(accumulate(sizes)))

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


@dataclass(slots=True, eq=False)
class Pattern:
    """An envelope but for its sizes. form: the first that had it, where its sizes are those of its inputs, in their order."""

    form: Form | None = None


@lru_cache(_KEPT_ENVELOPES)
def _form(text: bytes) -> Form:
    """Where texts are sent, each envelope says how many bytes they have, and hardly one is as another was."""
    between = _SIZE.split(text)
    sizes = list(map(int, between[1::2]))
    pattern = _pattern(tuple(between[::2])) if sizes and b"\\" not in text else Pattern()
    form = None if pattern.form is None else pattern.form.sized(sizes)
    if form is None:
        form = Form(envelope_of(text))
        assert form.envelope is not None
        if [given.parameters.binary_data_size for given in form.envelope.inputs] == sizes:
            pattern.form = form
    return form


@lru_cache(_KEPT_ENVELOPES)
def _pattern(_: tuple[bytes, ...]) -> Pattern:
    return Pattern()


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
