"""Several users in one request of tensors: contexts beside how many candidates each is for."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.client.columns import array_tensors, joined_tensors
from deployments.protocol.input import encode
from deployments.protocol.request import parse
from deployments.scoring.job import Job
from dpiframe_core.errors import InputError, TooLarge
from dpiframe_core.features.row_block import RowBlock
from tests.deployments.scoring.test_packed_requests import ENCODER, SERVED, requests

ONE: dict[str, list[Any]] = {
    "item": ["a"], "site": ["x"], "strict": ["a"], "place": [1], "known": [5], "price": [1.0], "wide": [1.0], "step": [1.0],
    "tags": [["a"]],
}  # fmt: skip
IDS, DENSE = ("context_ids", "candidate_ids"), ("context_dense", "candidate_dense")


def body_of(tensors: Any, **parameters: Any) -> tuple[bytes, str]:
    inputs = [
        {"name": t.name, "shape": list(t.shape), "datatype": t.datatype, "parameters": {"binary_data_size": len(t.data)}}
        for t in tensors
    ]
    envelope = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    return envelope + b"".join(bytes(t.data) for t in tensors), str(len(envelope))


def encoded(tensors: Any, most: int = 1000, **parameters: Any) -> RowBlock:
    body, length = body_of(tensors, **parameters)
    return encode(SERVED, parse(body, length), most, Job("1", 0.0))


def rows_of(block: RowBlock) -> list[Any]:
    """What each row reads, its context's part first."""
    of = block.request_of_row
    parts = [block.wide_ids("context_ids")[of], block.context_dense[of], block.wide_ids("candidate_ids"), block.candidate_dense]
    return [tuple(part[i].tolist() for part in parts) for i in range(block.rows)]


@given(st.lists(requests(odd=False), min_size=1, max_size=4))
def test_users_together_are_encoded_as_each_alone(drawn: list[dict[str, Any]]) -> None:
    given_ = []
    for request in drawn:
        columns, context = dict(request["candidates"]), dict(request["context"])
        rows = len(columns["site"])
        columns.setdefault("item", [context.pop("item", None)] * rows)
        if "user" in columns:
            context["user"] = columns.pop("user")[0]
        columns |= {name: [None if v is None else float(v) for v in columns[name]] for name in ("wide", "step", "price")}
        given_.append((columns, {name: context[name] for name in ("user", "age")}))
    tensors, counts = joined_tensors(given_)
    block = encoded(tensors)
    alone = [ENCODER.encode(*each) for each in given_]
    assert rows_of(block) == [row for each in alone for row in rows_of(each)]
    assert (block.contexts, counts) == (len(drawn), [each.rows for each in alone])
    sections = {section: np.concatenate([each.wide_ids(section) for each in alone]) for section in IDS}  # type: ignore[arg-type]
    sections |= {section: np.concatenate([getattr(each, section) for each in alone]) for section in DENSE}
    sections["context_rows"] = np.array(counts, np.int32)
    assert rows_of(encoded(array_tensors(sections))) == rows_of(block)


def test_contexts_for_one_candidate_each_are_contexts() -> None:
    tensors, counts = joined_tensors([(ONE, {"user": "a", "age": i}) for i in range(2)])
    assert counts == [1, 1]
    assert encoded(tensors).context_dense.tolist() == [[0.0], [1.0]]


CONTEXT = {"context_ids": np.array([[2], [3]]), "context_dense": np.ones((2, 1), np.float32)}


def sections(**other: Any) -> dict[str, Any]:
    block = ENCODER.encode({name: values * 3 for name, values in ONE.items()}, {"user": "a", "age": 1})
    own = {"candidate_ids": block.wide_ids("candidate_ids"), "candidate_dense": block.candidate_dense}
    return own | CONTEXT | {"context_rows": np.array([1, 2])} | other


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"context_rows": np.array([1, 1])}, "context_rows: got 2, expected a sum of 3, the candidates"),
        ({"context_rows": np.array([0, 3])}, r"context_rows\[0\]: got 0, expected 1 to 3 candidates"),
        ({"context_rows": np.array([1, 2**62])}, r"context_rows\[1\]: got 4611686018427387904, expected 1 to 3 candidates"),
        ({"context_rows": np.array([3])}, "context_ids: got 2, expected 1 rows, as many as context_rows has"),
        ({"context_rows": np.zeros(0, np.int64)}, "context_ids: got 2, expected 0 rows, as many as context_rows has"),
        ({"context_rows": np.ones(2, np.float32)}, r"context_rows: got FP32 \[2\], expected INT32 or INT64 \[contexts\]"),
        ({"context_ids": np.array([[2], [99]])}, r"context_ids\[1, 0\]: got 99, expected an id of user from 0 to 19"),
        ({"context_ids": np.array([[2]] * 3)}, "context_ids: got 3, expected 2 rows, as many as context_rows has"),
    ],
)
def test_contexts_that_do_not_fit_are_refused_in_words(changed: dict[str, Any], message: str) -> None:
    assert encoded(array_tensors(sections())).request_of_row.tolist() == [0, 1, 1]
    with pytest.raises(InputError, match=f"^{message}"):
        encoded(array_tensors(sections(**changed)))


def test_the_bound_on_candidates_is_on_those_of_all_users() -> None:
    with pytest.raises(TooLarge, match=r"^inputs: got 3, expected at most 2 rows$"):
        encoded(array_tensors(sections()), most=2)


def test_a_wrong_value_of_a_context_is_named_by_its_place() -> None:
    tensors, _ = joined_tensors([(ONE, {"user": "a", "age": 1.0}), (ONE, {"user": "b", "age": float("nan")})])
    with pytest.raises(InputError, match=r"^context.age\[1\]: got nan, expected a finite number or null"):
        encoded(tensors)
    tensors = [t if t.name != "user" else array_tensors({"user": np.zeros(3)})[0] for t in tensors]
    with pytest.raises(InputError, match=r"^inputs.user: got 3, expected 2 rows, or 2, one a context"):
        encoded(tensors)
