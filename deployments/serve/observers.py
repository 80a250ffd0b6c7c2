"""What a replica has of the watchers of single requests, by its configuration, and their end."""

from collections.abc import Callable
from typing import Self

from deployments.config import DeploymentConfig
from deployments.score_log.recorder import ScoreRecorder
from deployments.scoring.watchers import Watchers
from deployments.telemetry.span_thread import SpanThread
from dpiframe_core.errors import ConfigError


class Observers:
    """Owns their threads. Made where requests are read: in a replica, or in an ingress of the fan-in."""

    def __init__(self, spans: SpanThread | None, recorder: ScoreRecorder | None) -> None:
        self._spans, self._recorder = spans, recorder
        self.watchers = Watchers(spans, recorder)

    @classmethod
    def of(cls, config: DeploymentConfig, unlogged: Callable[[str, str, int], None]) -> Self:
        """unlogged: `lost` of the `ScoreRecorder`. Raises ConfigError if what one needs is not there."""
        try:
            recorder = None if config.score_log is None else ScoreRecorder(config.score_log, unlogged)
        except OSError as error:
            raise ConfigError(f"score_log.folder: got {error.strerror!r}, expected a folder that can be made") from None
        return cls(SpanThread.of(config.tracing, config.application), recorder)

    def close(self) -> None:
        """Waits for what is left to be written and sent: some seconds at most."""
        for observer in (self._recorder, self._spans):
            if observer is not None:
                observer.close()
