"""All that `serve.test_http_app` claims, on the direct port: see this folder's conftest."""

from tests.deployments.serve.test_http_app import *  # noqa: F403
