"""Hands requests out as a `Desired` says, among the versions that a process has in its catalog."""

from deployments.lifecycle.desired import Desired
from deployments.scoring.catalog import Catalog, Share


def route(catalog: Catalog, desired: Desired) -> None:
    """From the next request on. All that `desired` names is in the catalog."""
    live, shares = {}, {}
    for name, state in desired.models.items():
        live[name] = catalog.loaded(name, state.live)
        canary, shadow = state.canary, state.shadow
        if canary is not None or shadow is not None:
            shares[name] = Share(
                None if canary is None else catalog.loaded(name, canary.version),
                0.0 if canary is None else canary.percent,
                None if canary is None else canary.by,
                None if shadow is None else catalog.loaded(name, shadow),
            )
    catalog.route(live, shares)
