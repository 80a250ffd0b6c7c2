"""What a client gives for an answer: the scores, and how far they are to be trusted."""

import json
from math import prod
from typing import Any

import httpx
import numpy as np

ENVELOPE_LENGTH = "Inference-Header-Content-Length"


class Scores(np.ndarray[Any, np.dtype[np.float32]]):
    """float32[n, tasks], an array like any other.

    Attributes:
        degraded_rows: how many ids of the whole answer were scored as unknown values, as their rows of tables were late. Not 0
            only where a model's tables have a `miss_budget_ms`. What is cut out of the array says the same.
    """

    degraded_rows: int = 0

    def __array_finalize__(self, of: object) -> None:
        self.degraded_rows = getattr(of, "degraded_rows", 0)


def scores_of(answer: httpx.Response, rows: int | None) -> Scores:
    """The scores of an answer in binary form, for so many candidates if that is known.

    Raises:
        ValueError, KeyError, TypeError: it is none; a proxy, or another service, may have answered.
    """
    length, content = int(answer.headers.get(ENVELOPE_LENGTH, "")), answer.content
    envelope = json.loads(content[:length])
    [output] = envelope["outputs"]
    shape, size = output["shape"], output["parameters"]["binary_data_size"]
    if (output["name"], output["datatype"]) != ("scores", "FP32"):
        raise ValueError(f"got {output['name']!r} of {output['datatype']!r}, expected 'scores' of 'FP32'")
    if len(shape) != 2 or size != 4 * prod(shape) or size != len(content) - length:
        raise ValueError(f"got {len(content) - length} bytes, said to be {size}, of shape {shape}")
    if rows is not None and shape[0] != rows:
        raise ValueError(f"got scores of {shape[0]} candidates, expected {rows}")
    scores = np.frombuffer(content, "<f4", offset=length).reshape(shape).astype(np.float32, copy=False).view(Scores)
    scores.degraded_rows = int((envelope.get("parameters") or {}).get("degraded_rows", 0))
    return scores
