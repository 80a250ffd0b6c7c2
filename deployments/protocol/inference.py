"""The Open Inference Protocol's view of the served models, as plain data: metadata, statistics, an index, and inference itself.

Knows neither HTTP nor gRPC: `rest` and `grpc_service` give it both.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from deployments.protocol.input import encode, first_value
from deployments.protocol.request import InferRequest
from deployments.scoring.catalog import Catalog
from deployments.scoring.job import Job
from deployments.scoring.scoring import Scoring
from deployments.scoring.served_model import ServedModel
from deployments.scoring.statistics import ModelStatistics, Statistics
from dpiframe_core.errors import InputError
from dpiframe_core.features.row_block import Floats, RowBlock
from dpiframe_core.features.schema import Feature, Numeric

SCORES = "scores"
EXTENSIONS = ("binary_tensor_data", "parameters", "statistics", "model_repository")
PLATFORM = "dpiframe"


class Inference:
    """Answers the protocol's questions about `models`, which may change while it runs, and scores for it."""

    def __init__(self, models: Catalog, scoring: Scoring, statistics: Statistics) -> None:
        self._models = models
        self._statistics = statistics
        self.scoring = scoring

    @property
    def catalog(self) -> Catalog:
        return self._models

    def server_ready(self) -> bool:
        return bool(self._models.live) and all(served.scorer.accepting for served in self._models.live.values())

    def model_ready(self, name: str, of_version: str) -> bool:
        """Raises ModelNotFound if there is none."""
        return self._served(name, of_version).scorer.accepting

    def server_metadata(self) -> dict[str, Any]:
        return {"name": PLATFORM, "version": version("dpiframe"), "extensions": list(EXTENSIONS)}

    def model_metadata(self, name: str, of_version: str) -> dict[str, Any]:
        """The features as inputs, for raw values; the forms of encoded requests are the same for every model."""
        info = self._served(name, of_version).info
        return {
            "name": info.name,
            "versions": self._models.versions(info.name),
            "platform": PLATFORM,
            "inputs": [_input(f) for f in info.features],
            "outputs": [{"name": SCORES, "datatype": "FP32", "shape": [-1, len(info.tasks)]}],
        }

    def model_config(self, name: str, of_version: str) -> dict[str, Any]:
        """The same as Triton words it, and its load generator asks for it: a dimension of rows, and no batches of its own."""
        metadata = self.model_metadata(name, of_version)
        return {
            "name": metadata["name"],
            "platform": PLATFORM,
            "max_batch_size": 0,
            "input": [_configured(tensor) for tensor in metadata["inputs"]],
            "output": [_configured(tensor) for tensor in metadata["outputs"]],
        }

    def model_statistics(self, name: str, of_version: str) -> dict[str, Any]:
        """Of one model, or of all without a name: what this process has seen since its start."""
        models = [self._served(name, of_version)] if name else list(self._models)
        return {"model_stats": [self._stats(served) for served in models]}

    def repository_index(self, ready_only: bool) -> list[dict[str, Any]]:
        index = []
        for served in self._models:
            ready = served.scorer.accepting
            if ready or not ready_only:
                state, reason = ("READY", "") if ready else ("UNAVAILABLE", "closing, or without an engine")
                index.append({"name": served.info.name, "version": served.info.version, "state": state, "reason": reason})
        return index

    def find(self, job: Job, name: str, of_version: str) -> ServedModel:
        """The model of a request, noted in its job, before more of it is read.

        Raises:
            ModelNotFound: there is none of that name or version.
        """
        served = self._served(name, of_version)
        job.model, job.version = served.info.name, served.info.version
        return served

    async def infer(
        self, job: Job, name: str, of_version: str, request: InferRequest, body_bytes: int
    ) -> tuple[ServedModel, Floats]:
        """Who has scored it, and float32[n, tasks], all finite.

        Raises:
            DPIFrameError: as `find`, the encoders and the scorer; InputError for an output that there is not.
        """
        encoding, served = self.encoding(job, request), self.chosen(job, name, of_version, request)
        scored = await self.scoring.score(
            job,
            served,
            encoding,
            deadline_ms=request.deadline_ms,
            priority=request.parameters.priority,
            values=request.values,
            body_bytes=body_bytes,
        )
        return served, np.ascontiguousarray(scored.scores, "<f4")

    def chosen(self, job: Job, name: str, of_version: str, request: InferRequest) -> ServedModel:
        """Who scores the request, noted in its job. Found anew: what there was when the body began to come may be gone.

        Raises:
            ModelNotFound: as `find`. InputError: the tensor that decides is damaged.
        """
        found, key = self._served(name, of_version), request.parameters.key
        served = self._models.choose(found, of_version or None, key, partial(first_value, request), job.request_id)
        job.model, job.version = served.info.name, served.info.version
        return served

    def encoding(self, job: Job, request: InferRequest) -> Callable[[ServedModel], RowBlock]:
        """What encodes the request for a version. Raises InputError for an output that there is not."""
        for output in request.outputs:
            if output.name != SCORES:
                raise InputError("outputs", output.name, SCORES)
        max_rows = self.scoring.limits.max_rows_per_request
        return lambda served: encode(served, request, max_rows, job)

    def _served(self, name: str, of_version: str) -> ServedModel:
        return self._models.find(name, of_version or None)

    def _stats(self, served: ServedModel) -> dict[str, Any]:
        info, seen = served.info, self._statistics.models.get((served.info.name, served.info.version)) or ModelStatistics()
        batches = served.batch_sizes().counts
        rest_ms = max(0.0, seen.total_ms - seen.queue_ms - seen.encode_ms - seen.device_ms)
        times = {
            "success": (seen.success, seen.total_ms), "fail": (seen.fail, seen.fail_ms), "queue": (seen.success, seen.queue_ms),
            "compute_input": (seen.success, seen.encode_ms), "compute_infer": (seen.success, seen.device_ms),
            "compute_output": (seen.success, rest_ms), "cache_hit": (0, 0.0), "cache_miss": (0, 0.0),
        }  # fmt: skip
        return {
            "name": info.name,
            "version": info.version,
            "last_inference": seen.last_unix_ms,
            "inference_count": seen.rows,
            "execution_count": sum(batches.values()),
            "inference_stats": {name: {"count": count, "ns": round(ms * 1e6)} for name, (count, ms) in times.items()},
            "batch_stats": [],
        }


def answer_parameters(job: Job) -> dict[str, float | int]:
    """What an answer says beside the scores; times in milliseconds."""
    degraded = {"degraded_rows": job.degraded_rows} if job.degraded_rows else {}
    return {
        "oov_count": job.oov_count,
        **degraded,
        "queue_ms": round(job.queue_ms, 3),
        "encode_ms": round(job.encode_ms, 3),
        "device_ms": round(job.device_ms, 3),
    }


def _input(f: Feature) -> dict[str, Any]:
    datatype = "FP32" if isinstance(f, Numeric) else "BYTES" if f.values == "string" else "INT64"
    return {"name": f.name, "datatype": datatype, "shape": [-1] if f.max_values == 1 else [-1, -1]}


def _configured(tensor: dict[str, Any]) -> dict[str, Any]:
    kind = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": tensor["shape"]}
