"""Arrow streams of the features of `both_ways`, sound, odd and damaged."""

import json
import random
from typing import Any

import numpy as np
import pyarrow as pa

from tests.deployments.http_api.fuzz_bodies import changed

_TEXTS: list[Any] = ["a", "ö", "long text of a value", "", "b", "\x7f", "日本"]
_TEXT_KINDS = [pa.string(), pa.large_string(), pa.string_view()]
_ID_KINDS = [pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64()]
_NUMBER_KINDS = [*_ID_KINDS, pa.float32(), pa.float64()]
_LIST_KINDS = [make(kind) for make in (pa.list_, pa.large_list) for kind in _ID_KINDS]
_TAG_KINDS = [make(kind) for make in (pa.list_, pa.large_list) for kind in _TEXT_KINDS]
_GOOD: dict[str, tuple[list[Any], list[Any]]] = {
    "item": ([*_TEXTS, None], _TEXT_KINDS), "site": ([*_TEXTS, None], _TEXT_KINDS), "strict": (["a", "ö"], _TEXT_KINDS),
    "place": ([0, 5, 19, 30, None], _ID_KINDS), "known": ([4, 5, 6, None], _ID_KINDS), "price": ([0, 3, 100], _NUMBER_KINDS),
    "wide": ([0, 1, 2, None], _NUMBER_KINDS), "step": ([0, 1, 9, None], _NUMBER_KINDS), "ready": ([0, 7, 19], _ID_KINDS),
    "bag": ([[1], [0, 19, 2], [3]], _LIST_KINDS), "tags": ([["a"], [], ["a", "b"], None], _TAG_KINDS),
}  # fmt: skip
_LISTS = ("bag", "tags")
_ODD: list[Any] = [
    pa.array([True]), pa.nulls(1), pa.array([1.5]), pa.array(["x"]), pa.array([2**63], pa.uint64()), pa.array([-1]),
    pa.array([[None]], pa.list_(pa.int64())), pa.array([[]], pa.list_(pa.int64())), pa.array([[1] * 5]), pa.array([["a"]]),
    pa.array([None], pa.int8()), pa.array(["a"]).dictionary_encode(), pa.array([1], pa.timestamp("s")), pa.array([np.nan]),
]  # fmt: skip


def _with_dictionary(rng: random.Random, n: int, values: pa.Array) -> pa.DictionaryArray:
    places = [rng.choice([*range(len(values)), None]) for _ in range(n)]
    return pa.DictionaryArray.from_arrays(pa.array(places, rng.choice(_ID_KINDS)), values)


def stream(rng: random.Random, damaged: float) -> bytes:
    """A body; of so large a share some bytes are changed."""
    n = rng.choice((1, 1, 2, 3, 4, 9, 33))
    columns: dict[str, Any] = {}
    for name, (values, kinds) in _GOOD.items():
        columns[name] = pa.array(rng.choices(values, k=n), rng.choice(kinds))
        if name not in _LISTS and rng.random() < 0.15:
            columns[name] = _with_dictionary(rng, n, pa.array(values, columns[name].type))
    if rng.random() < 0.2:
        columns[rng.choice(list(columns))] = pa.concat_arrays([rng.choice(_ODD)] * n)
    context = {"user": rng.choice([*_TEXTS, None]), "age": rng.choice([3, 1.5, None])}
    table = pa.table(columns).replace_schema_metadata({"request": json.dumps({"context": context})})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for part in table.to_batches(max_chunksize=n if rng.random() < 0.7 else 2):
            writer.write_batch(part)
    body = sink.getvalue().to_pybytes()
    return changed(body, rng) if rng.random() < damaged else body
