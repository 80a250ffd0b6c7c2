"""The name by which Kubernetes imports a deployment: `import_path: deployments.app:build`."""

from typing import Any

from ray import serve

from deployments.config import parse_config
from deployments.serve.application import application


def build(args: dict[str, Any]) -> serve.Application:
    """The `import_path` of a Serve config file, whose `args` are a deployment's configuration, checked as strictly as a file.

    Raises:
        ConfigError: Serve's own schema ignores unknown keys; ours does not.
    """
    return application(parse_config(args, "args"))
