"""The typed client of the service. Needs NumPy and httpx only; knows nothing of the server's code."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deployments.client.call import ClientError
    from deployments.client.client import AsyncClient, Client
    from deployments.client.scores import Scores

__all__ = ["AsyncClient", "Client", "ClientError", "Scores"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from deployments.client import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
