"""Tensors from bytes and from JSON: the oracle reads one value after the other, as the protocol words it."""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.client.columns import encoded_texts
from deployments.protocol.tensors import DTYPES, Tensor, check_size, flattened, numbers_of, texts_of
from dpiframe_core.errors import InputError
from kernels.runtime import c_build

TEXTS = st.lists(st.text(max_size=12) | st.text("ab\0é", max_size=300), max_size=8)


def bytes_tensor(name: str, texts: list[str]) -> Tensor:
    return Tensor(name, "BYTES", (len(texts),), memoryview(encoded_texts([text.encode() for text in texts])))


def oracle(data: bytes, count: int) -> list[bytes] | None:
    values = []
    for _ in range(count):
        if len(data) < 4:
            return None
        (size,) = struct.unpack("<I", data[:4])
        if len(data) < 4 + size:
            return None
        values.append(data[4 : 4 + size])
        data = data[4 + size :]
    return None if data else values


@pytest.fixture(autouse=True, scope="module", params=[True, False], ids=["C", "no C"])
def in_c(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr(c_build, "request_extension", lambda: None)
        yield


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_texts_come_back_whatever_they_are(columns: list[list[str]]) -> None:
    assert texts_of([bytes_tensor(f"t{i}", texts) for i, texts in enumerate(columns)]) == columns


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=50), st.integers(1, 4))
def test_plain_texts_of_several_tensors_come_back(texts: list[str], tensors: int) -> None:
    assert texts_of([bytes_tensor(f"t{i}", texts[i:]) for i in range(tensors)]) == [texts[i:] for i in range(tensors)]


@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 5)), min_size=1, max_size=3))
def test_any_bytes_are_read_as_the_protocol_words_it_or_refused(parts: list[tuple[bytes, int]]) -> None:
    tensors = [Tensor(f"t{i}", "BYTES", (count,), memoryview(data)) for i, (data, count) in enumerate(parts)]
    expected = [oracle(data, count) for data, count in parts]
    try:
        wanted = [[value.decode() for value in values] for values in expected if values is not None]
    except UnicodeDecodeError:
        wanted = []
    if len(wanted) == len(parts):
        assert texts_of(tensors) == wanted
    else:
        with pytest.raises(InputError, match=r"^t\d|^inputs\.t\d"):
            texts_of(tensors)


def test_a_value_that_reaches_into_the_next_tensor_is_refused() -> None:
    """Together the two hold two sound values, and each the right number of them on average."""
    both = encoded_texts([b"abcdef", b"xy"])
    tensors = [Tensor("a", "BYTES", (1,), both[:8]), Tensor("b", "BYTES", (1,), both[8:])]
    with pytest.raises(InputError, match=r"^inputs\.a\[0\]: got 8 bytes left, expected its length in 4 bytes"):
        texts_of(tensors)


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (b"", 1, "inputs.t[0]: got 0 bytes left, expected its length in 4 bytes, and so many bytes"),
        (b"\x02\0\0\0a", 1, "inputs.t[0]: got 5 bytes left, expected"),
        (b"\xff\xff\xff\xffab", 1, "inputs.t[0]: got 6 bytes left, expected"),
        (b"\x01\0\0\0a\x01\0", 2, "inputs.t[1]: got 2 bytes left, expected"),
        (b"\x01\0\0\0ab", 1, "inputs.t: got 6, expected 5 bytes, which its 1 values take"),
        (b"\x01\0\0\0a\x01\0\0\0\xff", 2, "inputs.t[1]: got b'\\xff', expected text in UTF-8"),
    ],
)
def test_broken_texts_are_named(data: bytes, count: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        texts_of([bytes_tensor("ok", ["a", "b"]), Tensor("t", "BYTES", (count,), data)])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BOOL"])
def test_numbers_are_views_of_the_body_wherever_they_start(datatype: str) -> None:
    values = np.array([[1, 2, 3], [4, 5, 6]], DTYPES[datatype])
    body = b"abc" + values.tobytes()
    out = numbers_of(Tensor("t", datatype, (2, 3), memoryview(body)[3:]))
    assert np.array_equal(out, values)
    assert out.dtype == values.dtype
    assert np.shares_memory(out, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize(
    ("datatype", "data", "wanted"),
    [
        ("INT8", [-128, 127], np.int8([-128, 127])),
        ("UINT16", [0, 65_535], np.uint16([0, 65_535])),
        ("FP32", [1, 0.1], np.float32([1, 0.1])),
        ("BOOL", [True, False], np.array([True, False])),
    ],
)
def test_json_numbers_take_their_datatype(datatype: str, data: list[Any], wanted: np.ndarray[Any, Any]) -> None:
    out = numbers_of(Tensor("t", datatype, (2,), data))
    assert np.array_equal(out, wanted)
    assert out.dtype == wanted.dtype


@pytest.mark.parametrize(
    ("datatype", "data", "message"),
    [
        ("INT8", [1, 128], "inputs.t.data[1]: got 128, expected an integer that INT8 can hold"),
        ("UINT32", [-1, 1], "inputs.t.data[0]: got -1, expected an integer that UINT32 can hold"),
        ("INT64", [1, 2**63], "inputs.t.data[1]: got 9223372036854775808, expected an integer of 64 bits or null"),
        ("INT32", [1, 1.0], "inputs.t.data[1]: got 1.0, expected an integer of 64 bits or null"),
        ("INT32", [1, None], "inputs.t.data[1]: got null, expected a value: ids and masks cannot be missing"),
        ("FP32", [1, "2"], "inputs.t.data[1]: got '2', expected a finite number or null"),
        ("BOOL", [True, 1], "inputs.t.data[1]: got 1, expected true or false"),
    ],
)
def test_json_values_that_do_not_fit_are_named(datatype: str, data: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        numbers_of(Tensor("t", datatype, (2,), data))
    assert str(caught.value) == message


def test_a_size_that_is_not_the_shapes_is_refused() -> None:
    with pytest.raises(InputError, match=r"^inputs\.t: got 7, expected 8 bytes, as INT32 \[2\] has$"):
        check_size(Tensor("t", "INT32", (2,), b"1234567"))
    with pytest.raises(InputError, match=r"^inputs\.t\.data: got 3, expected 2 values, as shape \[2\] says$"):
        check_size(Tensor("t", "INT32", (2,), [1, 2, 3]))
    with pytest.raises(InputError, match="expected 36893488113059364872 bytes"):
        check_size(Tensor("t", "INT64", (2**31 - 1, 2**31 - 1), b"12345678"))


def test_nested_json_is_read_row_by_row_and_no_deeper_than_the_shape() -> None:
    assert flattened([[1, 2], [3, 4]], 2) == [1, 2, 3, 4]
    assert flattened([1, 2, 3, 4], 2) == [1, 2, 3, 4]
    assert flattened([[1, 2], [3, 4]], 1) == [[1, 2], [3, 4]]
    assert flattened([[1, [2]], [3, 4]], 2) == [1, [2], 3, 4]
    assert flattened([], 2) == []
