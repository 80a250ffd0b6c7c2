"""What every peer serves: our own encoder and engine, so that only the servers differ; and the three bodies, read plainly."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.row_block import Floats, RowBlock

MAX_BATCH = 32  # requests; what a peer with a batcher of its own is told
MAX_WAIT_MS = 2
_DTYPES = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32}


class PeerModel:
    """A bundle on a device, as a peer's worker holds it."""

    def __init__(self, bundle: str | Path, device: str) -> None:
        read = read_bundle(bundle)
        self.engine = Engine(read, device, None, EngineOptions(lanes=1))
        self.engine.warmup()
        self._encoded = PreencodedReader(read.manifest.feature_schema)

    def rows(self, body: dict[str, Any]) -> RowBlock:
        """{"context": {..}, "candidates": [{..}, ..]}"""
        candidates = body["candidates"]
        return self.columns({"context": body["context"], "candidates": {k: [c[k] for c in candidates] for k in candidates[0]}})

    def columns(self, body: dict[str, Any]) -> RowBlock:
        """{"context": {..}, "candidates": {name: [..], ..}}"""
        return self.engine.encoder.encode(body["candidates"], body["context"])

    def binary(self, body: bytes) -> RowBlock:
        """An Open Inference Protocol request; our clients end its envelope with a line feed."""
        envelope, _, tensors = body.partition(b"\n")
        arrays, at = {}, 0
        for given in json.loads(envelope)["inputs"]:
            size = given["parameters"]["binary_data_size"]
            arrays[given["name"]] = np.frombuffer(tensors[at : at + size], _DTYPES[given["datatype"]]).reshape(given["shape"])
            at += size
        return self.sections(arrays)

    def sections(self, arrays: dict[str, Any]) -> RowBlock:
        """Encoded arrays by section, as `PreencodedReader.block` takes them."""
        return self._encoded.block(arrays)

    def reader(self, form: str) -> Callable[[bytes], RowBlock]:
        """From a raw body, for servers that leave parsing to their user."""
        if form == "binary":
            return self.binary
        read = self.rows if form == "rows" else self.columns
        return lambda body: read(json.loads(body))

    def scores(self, blocks: Sequence[RowBlock]) -> list[Floats]:
        """float32[n] for each request, in as few runs as their rows allow."""
        out: list[Floats] = []
        at = 0
        while at < len(blocks):
            stop, rows = at, 0
            while stop < len(blocks) and (stop == at or rows + blocks[stop].rows <= self.engine.max_batch_rows):
                rows += blocks[stop].rows
                stop += 1
            scores = self.engine.run_batch(blocks[at:stop]).scores[:, 0]
            out += np.split(scores, np.cumsum([block.rows for block in blocks[at : stop - 1]]))
            at = stop
        return out
