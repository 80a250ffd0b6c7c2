"""One set of requests in each body form, and the scores that every server must answer to them. Knows no servers."""

import json
from collections.abc import Mapping, Sequence
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

    def bodies(self, form: str, *, wrapped: bool = False, batched: bool = False) -> tuple[dict[str, str], list[bytes]]:
        """Headers and bodies. wrapped: in BentoML's list. batched: tensors with one dimension more, the requests of a batch, as
        Triton has them; JSON is such a tensor's bytes."""
        if form == "binary":
            return _framed([_binary(block, batched) for block in self.blocks])
        if form == "bytes":
            return _bytes(self.raw)
        if form == "arrow":
            return {"Content-Type": "application/vnd.apache.arrow.stream"}, [_arrow(request) for request in self.raw]
        requests: list[Any] = self.raw
        if form == "rows":
            requests = [r | {"candidates": _transposed(r["candidates"])} for r in self.raw]
        if wrapped:
            requests = [{"requests": [r]} for r in requests]
        bodies = [json.dumps(r, separators=(",", ":")).encode() for r in requests]
        return _framed([_text(body) for body in bodies]) if batched else ({"Content-Type": "application/json"}, bodies)


def _framed(requests: Sequence[tuple[dict[str, Any], bytes]]) -> tuple[dict[str, str], list[bytes]]:
    """Open Inference Protocol requests of envelopes and tensors. A line feed ends an envelope, for those who see no headers;
    they have one length, for one set of headers."""
    envelopes = [json.dumps(envelope, separators=(",", ":")).encode() for envelope, _ in requests]
    longest = max(map(len, envelopes))
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(longest + 1)}
    return headers, [e.ljust(longest) + b"\n" + tensors for e, (_, tensors) in zip(envelopes, requests, strict=True)]


def _text(body: bytes) -> tuple[dict[str, Any], bytes]:
    one = {"name": "request", "shape": [1, len(body)], "datatype": "UINT8", "parameters": {"binary_data_size": len(body)}}
    return {"inputs": [one]}, body


def _bytes(requests: list[dict[str, Any]]) -> tuple[dict[str, str], list[bytes]]:
    """Raw values in binary form, as our client sends them."""
    framed = []
    for request in requests:
        wired, _ = raw_tensors(request["candidates"], request["context"])
        inputs = [
            {"name": t.name, "shape": list(t.shape), "datatype": t.datatype, "parameters": {"binary_data_size": len(t.data)}}
            for t in wired
        ]
        framed.append(({"inputs": inputs, "parameters": {"binary_data_output": True}}, b"".join(t.data for t in wired)))
    return _framed(framed)


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


def _binary(block: RowBlock, batched: bool) -> tuple[dict[str, Any], bytes]:
    """Encoded sections."""
    arrays = {
        "context_ids": block.wide_ids("context_ids"), "candidate_ids": block.wide_ids("candidate_ids"),
        "context_dense": block.context_dense, "candidate_dense": block.candidate_dense,
    }  # fmt: skip
    inputs, tensors = [], []
    for name, array in arrays.items():
        if not array.shape[1]:
            continue
        shape = [1, *array.shape] if batched else list(array.shape)
        datatype, parameters = _DATATYPES[array.dtype], {"binary_data_size": array.nbytes}
        inputs.append({"name": name, "shape": shape, "datatype": datatype, "parameters": parameters})
        tensors.append(array.tobytes())
    return {"inputs": inputs, "outputs": [{"name": "scores", "parameters": {"binary_data": True}}]}, b"".join(tensors)
