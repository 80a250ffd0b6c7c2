"""FastAPI under one uvicorn worker (uvloop, httptools), no batching: `python -m benchmarks.serving.peers.uvicorn_fastapi
BUNDLE PORT DEVICE FORM`. JSON through a pydantic body, as its users write it; binary through the raw request."""

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from benchmarks.serving.peers.model import PeerModel


class RowsBody(BaseModel):
    context: dict[str, Any]
    candidates: list[dict[str, Any]]


class ColumnsBody(BaseModel):
    context: dict[str, Any]
    candidates: dict[str, list[Any]]


def app_of(model: PeerModel, form: str) -> FastAPI:
    app = FastAPI()

    async def rows(body: RowsBody) -> dict[str, list[float]]:
        return {"scores": model.scores([model.rows(body.__dict__)])[0].tolist()}

    async def columns(body: ColumnsBody) -> dict[str, list[float]]:
        return {"scores": model.scores([model.columns(body.__dict__)])[0].tolist()}

    async def binary(request: Request) -> Response:
        return Response(model.scores([model.binary(await request.body())])[0].tobytes())

    app.post("/score")({"rows": rows, "columns": columns, "binary": binary}[form])
    return app


if __name__ == "__main__":
    bundle, port, device, form = sys.argv[1:]
    torch.set_num_threads(1)
    uvicorn.run(app_of(PeerModel(bundle, device), form), host="127.0.0.1", port=int(port), log_level="warning")
