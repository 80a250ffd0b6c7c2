"""Deploys the Serve configuration of a RayService on a cluster of this host, as KubeRay does through Ray's dashboard.

`python -m tests.k8s.serve_embedded FILE`, whose JSON has `serve` and `environment`. Says "ready", deploys what each line of its
input has in the place of `serve`, stops when its input ends.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    wanted = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(wanted["environment"])
    from deployments.config import parse_config
    from deployments.serve.cluster import private_cluster

    (application,) = wanted["serve"]["applications"]
    with private_cluster(parse_config(application["args"], "args"), lambda step: print(step, flush=True)):
        from ray import serve
        from ray.serve._private.api import serve_start
        from ray.serve.schema import ServeDeploySchema

        config = ServeDeploySchema.model_validate(wanted["serve"])
        client = serve_start(
            http_options=config.http_options.model_dump(),
            grpc_options=config.grpc_options.model_dump(),
            proxy_location=config.proxy_location,
            global_logging_config=config.logging_config,
        )
        client.deploy_apps(config)
        while (status := serve.status().applications[application["name"]]).status != "RUNNING":
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                sys.exit(f"{status.message}\n" + "\n".join(d.message for d in status.deployments.values()))
            time.sleep(0.1)
        print("ready", flush=True)
        for line in sys.stdin:
            client.deploy_apps(ServeDeploySchema.model_validate_json(line))


if __name__ == "__main__":
    main()
