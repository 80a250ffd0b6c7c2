"""The baseline of suite `http`: FastAPI under uvicorn that encodes a pydantic body and calls the eager PyTorch model.

What one writes in an afternoon, done well: columnar body, our own vectorised encoder, the trained module, no batching.
Run as `python -m benchmarks.serving.peers.eager_http BUNDLE PORT`.
"""

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from deployments.demo.train import DeepFM, EncodedRows
from dpiframe_core.bundle.bundle import Bundle, read_bundle
from dpiframe_core.features.encoder import Encoder


class Body(BaseModel):
    """The same request as `POST /v1/score` takes."""

    context: dict[str, Any]
    candidates: dict[str, list[Any]]


def eager_model(bundle: Bundle) -> DeepFM:
    """The demo's own nn.Module with the bundle's weights: a table per field."""
    schema = bundle.manifest.feature_schema
    model = DeepFM(schema, bundle.manifest.architecture.hidden_units)
    state = dict(bundle.dense)
    for f in schema.features:
        state[f"embedding.{f.name}.weight"] = bundle.tables[f.table]
        state[f"first_order.{f.name}.weight"] = bundle.tables[f.first_order_table]
    model.load_state_dict(state)
    return model.eval()


def app_of(bundle: Bundle) -> FastAPI:
    """One route, scoring in the event loop as such apps do."""
    app = FastAPI()
    schema = bundle.manifest.feature_schema
    model, encoder = eager_model(bundle), Encoder(schema, bundle.vocabularies)

    @app.post("/v1/score")
    async def score(body: Body) -> dict[str, list[float]]:
        rows = EncodedRows.of(encoder.encode(body.candidates, body.context), schema)
        with torch.inference_mode():
            return {"scores": torch.sigmoid(model(rows.numbers, rows.ids))[:, 0].tolist()}

    return app


if __name__ == "__main__":
    torch.set_num_threads(1)  # with two, and a client beside it on two cores, it is slower
    uvicorn.run(app_of(read_bundle(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
