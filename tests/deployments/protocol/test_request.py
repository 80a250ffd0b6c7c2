"""An envelope that is sent again and again is checked once; what may differ from one body to the next is checked each time."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.protocol.request import InferRequest, _form, _pattern, parse
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


def texts_of(sizes: list[int], space: str = " ", more: str = "") -> bytes:
    """An envelope of texts a and c and of two numbers b between them, in so many bytes."""
    kinds = zip("abc", ("BYTES", "FP32", "BYTES"), sizes, strict=True)
    inputs = [
        f'{{"name":"{name}","shape":[2],"datatype":"{kind}","parameters":{{"binary_data_size":{space}{size}}}}}'
        for name, kind, size in kinds
    ]
    return f'{{"inputs":[{",".join(inputs)}]{more}}}'.encode()


def seen(head: bytes, body: bytes) -> object:
    try:
        request = parse(head + body, str(len(head)))
        return {name: (*tensor[:3], bytes(tensor.data)) for name, tensor in request.tensors.items()}
    except InputError as error:
        return type(error), str(error)


def seen_anew(head: bytes, body: bytes) -> object:
    """As by a server that has met no envelope yet."""
    _form.cache_clear()
    _pattern.cache_clear()
    return seen(head, body)


def test_an_envelope_with_other_sizes_of_texts_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_anew(texts_of([9, 8, 10]), bytes(27))
    head = texts_of([12, 8, 11])
    with monkeypatch.context() as patch:
        patch.setattr("deployments.protocol.request.envelope_of", lambda _: pytest.fail("read again"))
        found = parse(head + b"A" * 12 + b"B" * 8 + b"C" * 11, str(len(head)))
        assert [bytes(t.data) for t in found.tensors.values()] == [b"A" * 12, b"B" * 8, b"C" * 11]
    assert [tensor.shape for tensor in found.tensors.values()] == [(2,)] * 3


SIZES = st.integers(0, 20) | st.sampled_from([8, 2**31 - 1, 2**31, 10**9, 10**12])
MORE = ["", ',"id":"binary_data_size"', ',"parameters":{"binary_data_size": 3}', ',"id":"\\u0041"', ',"x":1', ',"outputs":[]']


@given(
    st.lists(st.tuples(st.lists(SIZES, min_size=3, max_size=3), st.booleans()), min_size=2, max_size=4),
    st.sampled_from([" ", "", "  ", "\n"]), st.sampled_from(MORE),
)  # fmt: skip
def test_what_is_known_of_other_sizes_changes_no_answer(asked: list[tuple[list[int], bool]], space: str, more: str) -> None:
    bodies = []
    for sizes, whole in asked:
        sizes = [sizes[0], 8 if whole else sizes[1], sizes[2]]
        bodies.append((texts_of(sizes, space, more), bytes(min(sum(sizes), 64))))
    alone = [seen_anew(*body) for body in bodies]
    _form.cache_clear()
    _pattern.cache_clear()
    assert [seen(*body) for body in bodies] == alone


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('"binary_data_size":8,"binary_data_size":8', '"binary_data_size":9,"binary_data_size":8'),  # the last one counts
        ('"binary_data_size":8,"binary_data_siz\\u0065":8', '"binary_data_size":9,"binary_data_siz\\u0065":8'),
        ('"binary_data_size":8', '"binary_data_size":8.0'),
        ('"binary_data_size":8', '"binary_data_size":08'),
        ('"binary_data_size":8', '"binary_data_size":8e0'),
        ('"binary_data_size":8', '"binary_data_size":#'),
    ],
)
def test_a_size_that_is_said_in_another_way_is_read_as_ever(first: str, second: str) -> None:
    heads = [texts_of([8, 8, 8]).replace(b'"binary_data_size": 8', said.encode(), 1) for said in (first, second)]
    alone = [seen_anew(head, bytes(24)) for head in heads]
    _form.cache_clear()
    _pattern.cache_clear()
    assert [seen(head, bytes(24)) for head in (heads[0], *heads)] == [alone[0], *alone]
