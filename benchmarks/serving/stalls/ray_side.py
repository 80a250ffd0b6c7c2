"""Joins a service's Ray cluster and does to its processes what the suite `stalls` asks for, a line of stdin each:

look            finds the processes
collector off   Python's collector, in all that serve; `collector on`: as it was
reload          of HAProxy, as after a change of replicas
replicas Ingress 1   so many more of that deployment, as autoscaling does it; `replicas Ingress -1`: as many less
"""

import sys
from collections.abc import Sequence
from typing import Any


def _collector(actor: Any, on: bool) -> None:
    import gc

    (gc.enable if on else gc.disable)()


def _reload(manager: Any) -> None:
    if type(manager).__name__ == "HAProxyManager":  # else Serve's fallback
        manager.event_loop.call_soon_threadsafe(manager._schedule_haproxy_update)


def _scale(controller: Any, deployment: str, more: int) -> None:
    deployments = controller.deployment_state_manager
    [(known, state)] = [(of, state) for of, state in deployments._deployment_states.items() if of.name == deployment]
    deployments.set_target_num_replicas(known, state.target_num_replicas + more)


def _called(actors: Sequence[Any], function: Any, *arguments: object) -> None:
    import ray

    ray.get([actor.__ray_call__.remote(function, *arguments) for actor in actors])


def main() -> None:
    import ray
    from ray.util import list_named_actors

    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="ERROR")
    names = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == "serve"]
    serving = [ray.get_actor(name) for name in names if "SERVE_REPLICA" in name]
    controllers = [ray.get_actor(name) for name in names if name.startswith("SERVE_CONTROLLER_ACTOR")]
    proxies = [ray.get_actor(name) for name in names if name.startswith("SERVE_PROXY_ACTOR")]
    for line in sys.stdin:
        match line.split():
            case ["collector", state]:
                _called(serving, _collector, state == "on")
            case ["reload"]:
                _called(proxies, _reload)
            case ["replicas", deployment, more]:
                _called(controllers, _scale, deployment, int(more))
        print("done", flush=True)


if __name__ == "__main__":
    main()
