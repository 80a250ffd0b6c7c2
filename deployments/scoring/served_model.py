"""A model that this process serves: what the routes need to know of it, and where its rows go. Knows no HTTP and no Ray."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from pydantic import BaseModel

from deployments.batching.scorer import Scorer
from deployments.config import Limits
from deployments.scoring.request_form import RequestForm
from deployments.scoring.score_sample import ScoreSample
from dpiframe_core.engine.buckets import BatchSizes, Counts, batch_sizes
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.raw_columns import ColumnValues, Int64s
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Feature, FeatureSchema, Table
from dpiframe_core.graph.architecture import Architecture

_LAST_REQUEST_S = 60.0


class ManifestLike(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def tasks(self) -> tuple[str, ...]: ...
    @property
    def architecture(self) -> Architecture: ...


class EngineLike(Protocol):
    """The part of `Engine` that describes it; scoring goes through a `Scorer`."""

    @property
    def manifest(self) -> ManifestLike: ...
    @property
    def schema(self) -> FeatureSchema: ...
    @property
    def encoder(self) -> Encoder: ...
    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def buckets(self) -> tuple[int, ...]: ...
    @property
    def batch_sizes(self) -> Counts: ...


class ModelInfo(BaseModel):
    """A served model, as `/v1/models` describes it."""

    name: str
    version: str
    architecture: Architecture
    tasks: tuple[str, ...]
    features: tuple[Feature, ...]
    tables: tuple[Table, ...]
    device: str
    precision: str


class ModelList(BaseModel):
    models: list[ModelInfo]


class InUse:
    """Counts those who are within its `with`, or between `enter` and `leave`, on one event loop; `elsewhere` count others."""

    def __init__(self) -> None:
        self._users = 0
        self.elsewhere: list[Callable[[], int]] = []

    def enter(self) -> None:
        self._users += 1

    def leave(self, *_: object) -> None:
        self._users -= 1

    __enter__, __exit__ = enter, leave

    async def over(self) -> None:
        """Returns once nobody is; after a minute in any case."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _LAST_REQUEST_S
        while (self._users or any(count() for count in self.elsewhere)) and loop.time() < give_up:
            await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model at one version. `in_use` while a request is scored by it: a `Catalog` hands it out, then takes it back."""

    info: ModelInfo
    encoder: Encoder
    encoded: PreencodedReader
    scorer: Scorer
    form: RequestForm
    batch_sizes: Callable[[], BatchSizes]
    example: Mapping[str, Any] | None = None
    sample: ScoreSample = field(default_factory=ScoreSample)
    in_use: InUse = field(default_factory=InUse)

    def encode(
        self, candidates: Mapping[str, ColumnValues], context: Mapping[str, object], context_rows: Int64s | None = None
    ) -> RowBlock:
        """A request's rows, encoded where the scorer wants them. See `Encoder.encode`."""
        return self.encoder.encode(candidates, context, self.scorer.allocate, context_rows)

    @classmethod
    def of(
        cls,
        engine: EngineLike,
        scorer: Scorer,
        limits: Limits,
        *,
        name: str | None = None,
        version: str | None = None,
        example: Mapping[str, Any] | None = None,
    ) -> Self:
        """`name` and `version` override the bundle's. `example` is a request body for the documentation."""
        manifest, schema = engine.manifest, engine.schema
        info = ModelInfo(
            name=name or manifest.name,
            version=version or manifest.version,
            architecture=manifest.architecture,
            tasks=manifest.tasks,
            features=schema.features,
            tables=schema.tables,
            device=engine.device,
            precision=engine.precision,
        )

        def sizes() -> BatchSizes:
            return batch_sizes(info.name, info.version, engine.buckets, engine.batch_sizes)

        form = RequestForm(info.name, schema, limits)
        return cls(info, engine.encoder, PreencodedReader(schema), scorer, form, sizes, example)
