"""A configuration's model, loaded and warm. Knows no Ray; torch is imported only when something is loaded."""

from typing import TYPE_CHECKING

from deployments.config import DeploymentConfig, ModelRef

if TYPE_CHECKING:
    from dpiframe_core.engine.engine import Engine


def load_engine(config: DeploymentConfig, ref: ModelRef) -> "Engine":
    """Takes seconds to minutes: the bundle is verified, every bucket captured, the golden rows checked.

    Raises:
        BundleError, InputError: as `read_bundle`, `Engine` and `Engine.warmup`.
    """
    from dpiframe_core.bundle.bundle import read_bundle
    from dpiframe_core.engine.engine import Engine
    from dpiframe_core.engine.options import EngineOptions

    batching = config.batching
    options = EngineOptions(max_batch_rows=batching.max_batch_rows, lanes=batching.lanes or 0, buckets=batching.buckets)
    engine = Engine(read_bundle(ref.path), config.device, config.precision, options)
    engine.warmup()
    return engine
