"""All that `serve.test_http_app` and `http_api.test_gated` claim, by a Unix socket: see this folder's conftest."""

from tests.deployments.http_api.test_gated import *  # noqa: F403
from tests.deployments.serve.test_http_app import *  # noqa: F403
