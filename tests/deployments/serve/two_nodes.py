"""A Ray cluster of two nodes on this host: `python -m tests.deployments.serve.two_nodes STATE`, until its input ends.

Says where it is and which process is the second node's raylet. Its environment is that which our launcher gives a cluster.
"""

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from deployments.config import parse_config
from deployments.serve.cluster import serve_settings
from deployments.serve.host import port_windows

LOOPBACK = "127.0.0.2"


def main(state: Path) -> None:
    with port_windows(2) as windows:
        (state / "token").touch(0o600)
        (state / "token").write_text(secrets.token_hex(32))
        settings = serve_settings(parse_config({"models": [{"path": "x"}]}, "two nodes"), state, windows)
        os.environ.update(settings)
        from ray.cluster_utils import Cluster

        node: dict[str, Any] = {"num_cpus": 4, "num_gpus": 0, "object_store_memory": 80 * 2**20, "node_ip_address": LOOPBACK}
        head = {**node, "include_dashboard": False, "temp_dir": str(state / "ray")}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        worker = cluster.add_node(**node)
        cluster.wait_for_nodes(60)
        raylet = worker.all_processes["raylet"][0].process.pid
        print(
            json.dumps({"address": cluster.address, "raylet": raylet, "node": worker.node_id, "settings": settings}), flush=True
        )
        sys.stdin.read()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
