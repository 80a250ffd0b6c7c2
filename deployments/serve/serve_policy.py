"""`autoscaling` in Serve's terms: the class that the Serve controller makes from a deployment's `autoscaling_config.policy`.

HAProxy sends requests past Serve's routers, so Serve's own counts see none of them in a queue: the replicas report rows and
shares through `record_autoscaling_stats`. Serve pickles this module by value; what decides is imported, and so not pickled.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from deployments.config_load import Autoscaling
from deployments.serve import autoscaling


class RowPolicy:
    """Made once a deployment, from the keys of its `autoscaling` section; called by each of the controller's looks."""

    def __init__(self, **rules: Any) -> None:
        self._rules = Autoscaling(**rules)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Serve's AutoscalingContext. The bounds are applied by Serve again, scaled by its target capacity."""
        loads = loads_of(context.aggregated_metrics or {})
        seen = context.policy_state.get("seen")
        replicas, seen = autoscaling.decide(seen, context.current_time, context.target_num_replicas, loads, self._rules)
        return replicas, {"seen": seen}


def settings(rules: Autoscaling) -> dict[str, Any]:
    """Serve's `autoscaling_config` for these rules. Its own delays are off: there is one place that decides when."""
    return {
        "min_replicas": rules.min_replicas,
        "max_replicas": rules.max_replicas,
        "look_back_period_s": rules.look_back_s,
        "metrics_interval_s": rules.look_back_s / 5,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "policy": {"policy_function": f"{__name__}.RowPolicy", "policy_kwargs": rules.model_dump()},
    }


def reported(load: autoscaling.ReplicaLoad) -> dict[str, float]:
    """For `record_autoscaling_stats`: Serve takes a flat dict of numbers."""
    return asdict(load)


def loads_of(metrics: Mapping[str, Mapping[Any, float]]) -> list[autoscaling.ReplicaLoad]:
    """The loads in Serve's form, figure -> replica -> mean over the look-back period, of all replicas that reported them."""
    names = [field.name for field in fields(autoscaling.ReplicaLoad)]
    columns = [metrics.get(name, {}) for name in names]
    return [
        autoscaling.ReplicaLoad(*(c[replica] for c in columns)) for replica in columns[0] if all(replica in c for c in columns)
    ]
