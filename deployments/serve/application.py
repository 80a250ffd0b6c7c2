"""Turns a configuration into a Serve application: which deployments, on which resources, with which policy."""

import ray
from ray import serve

from deployments.config import DeploymentConfig
from deployments.remote_rows.row_shard import row_shards
from deployments.serve.engine_replica import EngineReplica
from deployments.serve.ingress_replica import IngressReplica
from deployments.serve.ray_metrics import require_port
from deployments.serve.replica import Replica
from deployments.serve.serve_policy import settings


def application(config: DeploymentConfig, *, constructor_tries: int = 3) -> serve.Application:
    """One deployment, since with a batcher in each replica a second hop gains nothing; or, as fan-in, engines and ingresses.

    Rows of tables that others answer for are deployments of their own.
    """
    if config.device == "auto":
        config = config.placed(int(ray.cluster_resources().get("GPU", 0)))
    require_port(config.metrics.port)
    autoscaling = settings(config.autoscaling) if config.autoscaling else None
    alike = {
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": constructor_tries,
        "max_ongoing_requests": config.max_ongoing_requests,
        "logging_config": {
            "log_level": config.log_level.upper(),
            "encoding": config.log_format.upper(),
            "enable_access_log": False,
        },
    }
    on_a_device = {
        "num_replicas": None if autoscaling else config.replicas,
        "autoscaling_config": autoscaling,
        "ray_actor_options": {"num_cpus": config.cpus_per_replica, "num_gpus": config.gpus_per_replica},
        "max_replicas_per_node": config.share_of_a_node(config.max_replicas),
    }
    shards = row_shards(config, alike)
    with_rows = (config, shards) if shards else (config,)
    if config.topology == "colocated":
        return serve.deployment(
            Replica, name="Replica", graceful_shutdown_timeout_s=config.drain_s, **on_a_device, **alike
        ).bind(*with_rows)
    # An engine outlasts the ingresses that it serves: it stops when they have left it.
    engine = serve.deployment(
        EngineReplica, name="Engine", graceful_shutdown_timeout_s=3 * config.drain_s, **on_a_device, **alike
    )
    ingress = serve.deployment(
        IngressReplica,
        name="Ingress",
        num_replicas=config.ingress_replicas,
        max_replicas_per_node=config.share_of_a_node(config.ingress_replicas),
        ray_actor_options={"num_cpus": config.cpus_per_ingress, "num_gpus": 0},
        graceful_shutdown_timeout_s=config.drain_s,
        **alike,
    )
    return ingress.bind(config, engine.bind(*with_rows))
