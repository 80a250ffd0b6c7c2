"""An envelope that is sent again and again is checked once; what may differ from one body to the next is checked each time."""

import json

import numpy as np
import pytest

from deployments.protocol.request import InferRequest, _form, parse
from deployments.protocol.tensors import numbers_of
from dpiframe_core.errors import InputError


def envelope(rows: int, size: int | None = None, **keys: object) -> bytes:
    size = rows * 8 if size is None else size
    tensor = {"name": "ids", "datatype": "INT64", "shape": [rows], "parameters": {"binary_data_size": size}}
    flags = {"name": "flags", "datatype": "UINT8", "shape": [rows], "parameters": {"binary_data_size": rows}}
    return json.dumps({"inputs": [tensor, flags], **keys}).encode()


def ids_of(request: InferRequest) -> list[int]:
    found: list[int] = numbers_of(request.tensors["ids"]).tolist()
    return found


def test_the_same_envelope_over_other_bytes_is_another_request() -> None:
    head = envelope(3, id="seven", parameters={"priority": 2})
    first = parse(head + np.arange(3).tobytes() + b"abc", str(len(head)))
    second = parse(head + np.arange(4, 7).tobytes() + b"def", str(len(head)))
    assert (ids_of(first), ids_of(second)) == ([0, 1, 2], [4, 5, 6])
    assert bytes(second.tensors["flags"].data) == b"def"
    assert second.id == "seven"
    assert second.parameters.priority == 2


@pytest.mark.parametrize("rows", [3, 500_000])  # of an envelope that is kept, and of one that is too much for it
def test_bytes_that_lack_or_are_too_many_are_refused_whether_the_envelope_is_known_or_not(rows: int) -> None:
    head = envelope(rows)
    good = head + bytes(rows * 9)
    for _ in range(2):
        assert parse(good, str(len(head))).tensors["ids"].shape == (rows,)
        with pytest.raises(InputError, match=r"inputs\.flags\.parameters\.binary_data_size: got .*bytes left"):
            parse(good[:-1], str(len(head)))
        with pytest.raises(InputError, match=f"body: got {rows * 9 + 1}, expected {rows * 9} bytes after the envelope"):
            parse(good + b"x", str(len(head)))


def test_an_envelope_whose_sizes_do_not_fit_its_shapes_is_refused_each_time() -> None:
    head = envelope(3, size=16)
    for _ in range(2):
        with pytest.raises(InputError, match=r"inputs\.ids: got 16, expected 24 bytes, as INT64"):
            parse(head + bytes(16 + 3), str(len(head)))


def test_what_is_kept_of_a_request_holds_none_of_its_bytes() -> None:
    head = envelope(100_000)
    for met in range(2):
        parse(head + bytes(900_000), str(len(head)))
        assert (_form(head).request is None) == (met == 0)  # a form of one request alone is not worth keeping
    kept = _form(head).request
    assert kept is not None
    assert [len(tensor.data) for tensor in kept.tensors.values()] == [0, 0]


def test_a_promise_of_gigabytes_costs_nothing() -> None:
    head = envelope(2**28, size=2**31 - 1)
    with pytest.raises(InputError, match="got 2147483647, expected as many bytes as follow; 4 bytes left"):
        parse(head + bytes(4), str(len(head)))
