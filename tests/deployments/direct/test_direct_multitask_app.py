"""All that `serve.test_multitask_app` claims, on the direct port: see this folder's conftest."""

from tests.deployments.serve.test_multitask_app import *  # noqa: F403
