"""One set of requests in each body form, and the scores that every server must answer to them. Knows no servers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import torch

from benchmarks.serving.peers.eager_http import eager_model
from deployments.client.columns import raw_tensors
from deployments.demo.train import EncodedRows
from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import RowBlock

FORMS = ("rows", "columns", "binary")
_COUNT = 16  # bodies in rotation
_DATATYPES = {np.dtype(np.int32): "INT32", np.dtype(np.int64): "INT64", np.dtype(np.float32): "FP32"}


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """Requests of `rows` candidates. scores: float32[rows] of the eager source model for each body."""

    rows: int
    raw: list[dict[str, Any]]  # context and candidate columns, as JSON has them
    blocks: list[RowBlock]
    scores: list[np.ndarray]

    @classmethod
    def draw(cls, bundle: Bundle, rows: int, seed: int) -> "Payloads":
        """Candidates are drawn from the values of the bundle's example.

        Raises:
            ValueError: it has none.
        """
        if bundle.example is None:
            raise ValueError(f"{bundle.path}: got no example.json, expected one to make requests from")
        rng, schema = np.random.default_rng(seed), bundle.manifest.feature_schema
        encoder, model = Encoder(schema, bundle.vocabularies), eager_model(bundle)
        raw, blocks, scores = [], [], []
        for _ in range(_COUNT):
            columns = {k: [v[i] for i in rng.integers(0, len(v), rows)] for k, v in bundle.example["candidates"].items()}
            raw.append({"context": bundle.example["context"], "candidates": columns})
            blocks.append(encoder.encode(columns, bundle.example["context"]))
            encoded = EncodedRows.of(blocks[-1], schema)
            with torch.inference_mode():
                scores.append(torch.sigmoid(model(encoded.numbers, encoded.ids))[:, 0].numpy())
        return cls(rows, raw, blocks, scores)

    def bodies(self, form: str, *, wrapped: bool = False, repeat_context: bool = False) -> tuple[dict[str, str], list[bytes]]:
        """Headers and bodies. wrapped: in BentoML's list. repeat_context: on every row, where a server cannot broadcast it."""
        if form == "binary":
            made = [_binary(block, repeat_context) for block in self.blocks]
            length = {len(body.partition(b"\n")[0]) + 1 for body in made}
            assert len(length) == 1  # one set of headers for all of them
            return {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(*length)}, made
        if form == "bytes":
            return _bytes(self.raw)
        if form == "arrow":
            return {"Content-Type": "application/vnd.apache.arrow.stream"}, [_arrow(request) for request in self.raw]
        requests: list[Any] = self.raw
        if form == "rows":
            requests = [r | {"candidates": _transposed(r["candidates"])} for r in self.raw]
        if wrapped:
            requests = [{"requests": [r]} for r in requests]
        return {"Content-Type": "application/json"}, [json.dumps(r, separators=(",", ":")).encode() for r in requests]


def _bytes(requests: list[dict[str, Any]]) -> tuple[dict[str, str], list[bytes]]:
    """Raw values in binary form, as our client sends them; envelopes of one length, for one set of headers."""
    envelopes, tensors = [], []
    for request in requests:
        wired = raw_tensors(request["candidates"], request["context"])
        inputs = [
            {"name": t.name, "shape": list(t.shape), "datatype": t.datatype, "parameters": {"binary_data_size": len(t.data)}}
            for t in wired
        ]
        envelopes.append(json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode())
        tensors.append(b"".join(t.data for t in wired))
    longest = max(map(len, envelopes))
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(longest)}
    return headers, [e.ljust(longest) + t for e, t in zip(envelopes, tensors, strict=True)]


def _arrow(request: dict[str, Any]) -> bytes:
    rest = json.dumps({"context": request["context"]})
    table = pa.table(request["candidates"]).replace_schema_metadata({"request": rest})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def scores_in(answer: httpx.Response, form: str) -> np.ndarray:
    """float32[rows] of any of the answers: raw float32, the protocol's binary form, or JSON of one of three shapes."""
    if form in ("binary", "bytes"):
        return np.frombuffer(answer.content[int(answer.headers.get("inference-header-content-length", 0)) :], np.float32)
    found = json.loads(answer.content)
    if isinstance(found, dict):
        found = found["scores"] if "scores" in found else found["outputs"][0]["data"]
    return np.array(found, np.float32).ravel()


def _transposed(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _binary(block: RowBlock, repeat_context: bool) -> bytes:
    """An Open Inference Protocol request of encoded sections. A line feed ends the envelope, for those who see no headers."""
    arrays = {
        "context_ids": block.wide_ids("context_ids"), "candidate_ids": block.wide_ids("candidate_ids"),
        "context_dense": block.context_dense, "candidate_dense": block.candidate_dense,
    }  # fmt: skip
    inputs, tensors = [], []
    for name, array in arrays.items():
        if not array.shape[1]:
            continue
        whole = np.ascontiguousarray(array[block.request_of_row] if repeat_context and name.startswith("context") else array)
        datatype, parameters = _DATATYPES[whole.dtype], {"binary_data_size": whole.nbytes}
        inputs.append({"name": name, "shape": list(whole.shape), "datatype": datatype, "parameters": parameters})
        tensors.append(whole.tobytes())
    envelope = {"inputs": inputs, "outputs": [{"name": "scores", "parameters": {"binary_data": True}}]}
    return json.dumps(envelope, separators=(",", ":")).encode() + b"\n" + b"".join(tensors)
