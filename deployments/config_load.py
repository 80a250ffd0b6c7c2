"""What a deployment says of its load: how requests become batches, and how many replicas there are for them."""

from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from dpiframe_core.strict import Strict

_QUEUED_ROWS, _QUEUED_ROWS_GPU = 65_536, 262_144  # by default: some tens of milliseconds of a device that is fast


class Batching(Strict):
    """How requests become batches: rows in one run, runs in flight, and rows that may wait before requests get a 429.

    `max_queued_rows`: by default 65,536, before a GPU 262,144. `buckets` are the batch sizes that a GPU captures a graph for:
    by default they grow geometrically, `dpiframe tune` finds better ones. `max_run_s`: a run that lasts longer hangs, and its
    process is ended and replaced (docs/faults.md).
    """

    max_batch_rows: Annotated[int, Field(ge=1, le=65536)] = 4096
    lanes: Annotated[int, Field(ge=1, le=8)] = 2
    max_queued_rows: Annotated[int, Field(ge=1)] | None = None
    buckets: tuple[Annotated[int, Field(ge=1)], ...] = ()
    max_run_s: Annotated[float, Field(ge=0.1, le=3600)] = 10

    @model_validator(mode="after")
    def _queue_holds_a_batch(self) -> Self:
        if self.max_queued_rows is not None and self.max_queued_rows < self.max_batch_rows:
            raise ValueError(
                f"max_queued_rows: got {self.max_queued_rows}, expected at least max_batch_rows {self.max_batch_rows}"
            )
        return self

    @model_validator(mode="after")
    def _buckets_hold_every_batch(self) -> Self:
        sizes = self.buckets
        if sizes and (sizes[-1] != self.max_batch_rows or any(a >= b for a, b in pairwise(sizes))):
            raise ValueError(f"buckets: got {list(sizes)}, expected growing sizes up to max_batch_rows {self.max_batch_rows}")
        return self

    def most_queued(self, device: str) -> int:
        """Rows that may wait before an engine on the device."""
        return self.max_queued_rows or (_QUEUED_ROWS if device == "cpu" else _QUEUED_ROWS_GPU)


class Autoscaling(Strict):
    """Bounds of the number of replicas, what each of them may have to do, and how long a need lasts before it counts.

    `target_busy` is a share of the time of a device, or of the event loop before it. `look_back_s` is what figures are averaged
    over. Rules: `autoscaling.decide`.
    """

    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)]
    target_busy: Annotated[float, Field(gt=0, le=0.95)] = 0.6
    target_queued_rows: Annotated[int, Field(ge=1)] = 4096
    look_back_s: Annotated[float, Field(ge=0.5, le=60)] = 5
    up_after_s: Annotated[float, Field(ge=0, le=600)] = 2
    down_after_s: Annotated[float, Field(ge=0, le=3600)] = 60

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: got {self.max_replicas}, expected at least min_replicas {self.min_replicas}")
        return self
