"""The environment of a private cluster: Serve's flags, what makes it faster, and a place of its own for all that is fixed."""

import os
from collections.abc import Sequence
from pathlib import Path

from deployments.config import DeploymentConfig
from deployments.metrics import LATENCY_BOUNDS_MS
from deployments.processes import proxy_threads
from deployments.serve.host import WINDOW, free_ports
from kernels.runtime.cores import usable_cores

FLAGS = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
# What a service can do without, but not as fast; see docs/serving.md.
FASTER = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.front.middlewares",
    "RAY_preload_python_modules": "deployments.worker_start",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # a line of log a request, which a Python process reads
    # Another goes to syslog's port, where mostly nobody listens: the kernel then answers each with an ICMP message. Serve's
    # configuration sets the level `info` behind this, past the `#`; `alert` is a replica that went down.
    "RAY_SERVE_HAPROXY_LOG_TARGET": "127.0.0.1:514 local0 alert #",
}
_MESSAGE_ROOM = 65_536  # bytes of a gRPC message beside its tensors


def serve_settings(config: DeploymentConfig, state: Path, windows: Sequence[int]) -> dict[str, str]:
    """The environment of a private cluster: the two flags, and free ports and own files for all that is fixed by default."""
    first, first_grpc, single = windows
    metrics, stats, fallback, fallback_grpc = free_ports(4, single)
    proxy = state / "haproxy"
    ours = {  # unless the user has his own
        **FASTER,
        "RAY_SERVE_HAPROXY_NBTHREAD": str(proxy_threads(usable_cores())),
        # Serve's default, 0.1, is two fifths of the CPU time that an idle service takes. A start takes 1 s longer.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        # libgomp spins between parallel regions; with HTTP on the same cores a region then waits for a whole time slice.
        "GOMP_SPINCOUNT": "10000",
    }
    return {
        **dict.fromkeys(FLAGS, "1"),
        **{name: os.environ.get(name, value) for name, value in ours.items()},
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        # A window of its own: else a stale HAProxy of one instance could reach a replica of another on a port used again. The
        # last port, which Serve leaves out, is taken: it holds the window.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + WINDOW - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first_grpc + WINDOW - 1),
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(config.limits.max_body_bytes + _MESSAGE_ROOM),  # else a message may have 2 GiB
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(config.drain_s),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(max(10, round(config.drain_s))),
        # Seconds without a byte of a request that a client has begun. By default 3600: 4,096 such clients, all that HAProxy
        # takes, lock out everybody else for an hour. Neither waiting for an answer nor an idle connection counts.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",
        # A HAProxy that died is started anew after three looks. By default they are ten seconds apart, and nobody is answered.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # Serve kills a proxy that is not ready by then, and its start fails with it. By default it has 5 s, imports included.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "a"),  # short: socket paths end at 108 bytes and hold a node id of 56
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
        "RAY_SERVE_REQUEST_LATENCY_BUCKETS_MS": ",".join(map(str, LATENCY_BOUNDS_MS)),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray runs workers at nice 15, so that on a busy host a replica comes after everything else.
        "RAY_worker_niceness": "0",
        # Anyone who reaches a Ray port could run code: a token that only this user can read guards them.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state / "token"),
    }
