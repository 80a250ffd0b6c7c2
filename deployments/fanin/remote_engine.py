"""The engines of this node as an ingress describes them to its clients. Knows neither torch nor Ray."""

from dataclasses import dataclass

from deployments.fanin.scorer import FanInScorer
from dpiframe_core.bundle.manifest import Manifest
from dpiframe_core.engine.buckets import Counts
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.schema import FeatureSchema


@dataclass(frozen=True, slots=True, eq=False)
class RemoteEngine:
    """An `EngineLike`: the manifest is read here, the rest is what an engine said of itself. Ask when one is connected."""

    manifest: Manifest
    encoder: Encoder
    scorer: FanInScorer

    @property
    def schema(self) -> FeatureSchema:
        return self.manifest.feature_schema

    @property
    def device(self) -> str:
        return self.scorer.search.welcome.device

    @property
    def precision(self) -> str:
        return self.scorer.search.welcome.precision

    @property
    def buckets(self) -> tuple[int, ...]:
        return self.scorer.search.welcome.buckets

    @property
    def batch_sizes(self) -> Counts:
        return self.scorer.batch_sizes
