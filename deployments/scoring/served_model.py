"""A model that this process serves: what the routes need to know of it, and where its rows go. Knows no HTTP and no Ray."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from pydantic import BaseModel

from deployments.batching.scorer import Scorer
from deployments.config import Limits
from deployments.scoring.request_form import RequestForm
from deployments.scoring.score_sample import ScoreSample
from dpiframe_core.engine.buckets import BatchSizes, Counts, batch_sizes
from dpiframe_core.errors import InputError, ModelNotFound
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.raw_columns import ColumnValues
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Feature, FeatureSchema, Table
from dpiframe_core.graph.architecture import Architecture


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


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model at one version. Replacing a model is replacing its `ServedModel` in the mapping that the app was built with."""

    info: ModelInfo
    encoder: Encoder
    encoded: PreencodedReader
    scorer: Scorer
    form: RequestForm
    batch_sizes: Callable[[], BatchSizes]
    example: Mapping[str, Any] | None = None
    sample: ScoreSample = field(default_factory=ScoreSample)

    def encode(self, candidates: Mapping[str, ColumnValues], context: Mapping[str, object]) -> RowBlock:
        """A request's rows, encoded where the scorer wants them."""
        return self.encoder.encode(candidates, context, self.scorer.allocate)

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


def find(models: Mapping[str, ServedModel], name: str | None, version: str | None) -> ServedModel:
    """The model of that name; without a name, the only one.

    Raises:
        ModelNotFound: none of that name or version is served.
        InputError: several are, and the request names none.
    """
    if name is None:
        if len(models) != 1:
            raise InputError("model", None, f"one of {sorted(models)}")
        served = next(iter(models.values()))
    elif name not in models:
        raise ModelNotFound("model", name, f"one of {sorted(models)}")
    else:
        served = models[name]
    if version is not None and version != served.info.version:
        raise ModelNotFound("version", version, f"{served.info.version!r}, the version of {served.info.name!r} served here")
    return served
