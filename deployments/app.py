"""Turns a configuration into a Serve application. Kubernetes imports `build` by name; the launcher calls `application`."""

from typing import Any

import ray
from ray import serve

from deployments.config import DeploymentConfig, parse_config
from deployments.replica import Replica
from deployments.serve_policy import settings


def build(args: dict[str, Any]) -> serve.Application:
    """The `import_path` of a Serve config file, whose `args` are a deployment's configuration, checked as strictly as a file.

    Raises:
        ConfigError: Serve's own schema ignores unknown keys; ours does not.
    """
    return application(parse_config(args, "args"))


def application(config: DeploymentConfig, *, constructor_tries: int = 3) -> serve.Application:
    """One deployment of one class: with a batcher in each replica there is nothing to gain from a second hop."""
    if config.device == "auto":
        config = config.placed(int(ray.cluster_resources().get("GPU", 0)))
    autoscaling = settings(config.autoscaling) if config.autoscaling else None
    deployment = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=None if autoscaling else config.replicas,
        autoscaling_config=autoscaling,
        max_ongoing_requests=config.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": config.gpus_per_replica},
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
        health_check_timeout_s=10,
        max_constructor_retry_count=constructor_tries,
        logging_config={"log_level": config.log_level.upper(), "enable_access_log": False},
    )
    return deployment.bind(config)
