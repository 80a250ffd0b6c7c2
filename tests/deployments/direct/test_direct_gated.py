"""All that `http_api.test_gated` claims, on the direct port: see this folder's conftest."""

from tests.deployments.http_api.test_gated import *  # noqa: F403
