"""All that `http_api.test_rude_clients` claims, on the direct port: see this folder's conftest."""

from tests.deployments.http_api.test_rude_clients import *  # noqa: F403
