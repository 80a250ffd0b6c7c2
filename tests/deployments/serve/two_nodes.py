"""A Ray cluster on this host: `python -m tests.deployments.serve.two_nodes STATE`, until its input ends. As on Kubernetes its
head has no cores for replicas; two other nodes have some, and one more for each line of the input.

Says where it is. Its environment is that which our launcher gives a cluster, but that it gives nodes up sooner.
"""

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from deployments.config import parse_config
from deployments.serve.host import port_windows
from deployments.serve.serve_settings import serve_settings

LOOPBACK = "127.0.0.2"
# By default a node that does not answer is given up after half a minute or more.
SOON = {"period_ms": "500", "timeout_ms": "500", "initial_delay_ms": "500", "failure_threshold": "4"}


def main(state: Path) -> None:
    with port_windows(3) as windows:
        (state / "token").touch(0o600)
        (state / "token").write_text(secrets.token_hex(32))
        settings = serve_settings(parse_config({"models": [{"path": "x"}]}, "two nodes"), state, windows)
        os.environ.update(settings | {f"RAY_health_check_{name}": value for name, value in SOON.items()})
        os.environ["RAY_TMPDIR"] = str(state)  # where Ray notes the cluster's address, in a folder that is the head's
        from ray.cluster_utils import Cluster

        node: dict[str, Any] = {"num_cpus": 4, "num_gpus": 0, "object_store_memory": 80 * 2**20, "node_ip_address": LOOPBACK}
        head = {**node, "num_cpus": 0, "include_dashboard": False, "temp_dir": str(state / "ray")}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(**node, wait=False)
        cluster.wait_for_nodes(60)
        print(json.dumps({"address": cluster.address, "settings": settings}), flush=True)
        for _ in sys.stdin:
            cluster.add_node(**node, wait=False)
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
