"""All that `http_api.test_arrow_body` claims, on the direct port: see this folder's conftest."""

from tests.deployments.http_api.test_arrow_body import *  # noqa: F403
