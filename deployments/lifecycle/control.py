"""How a route asks for a change of models: of the coordinator, or of a service whose models stay as they are."""

from collections.abc import Callable
from typing import Any, Protocol

from deployments.lifecycle.desired import Desired
from deployments.lifecycle.refusals import Conflict


class Control(Protocol):
    """`ask` is one of the methods of `Coordinator` for clients; it answers with its `state`."""

    async def ask(self, method: str, *args: Any, **named: Any) -> dict[str, Any]: ...


class FixedModels:
    """A `Control` of a service without a `models_root`."""

    def __init__(self, desired: Callable[[], Desired]) -> None:
        self._desired = desired

    async def ask(self, method: str, *args: Any, **named: Any) -> dict[str, Any]:
        """Raises Conflict for all but the state."""
        if method != "state":
            raise Conflict("models_root: got none in the configuration, expected the folder below which versions may be loaded")
        return self._desired().model_dump(mode="json") | {"replicas": []}
