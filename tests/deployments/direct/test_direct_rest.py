"""All that `protocol.test_rest` claims, on the direct port: see this folder's conftest."""

from tests.deployments.protocol.test_rest import *  # noqa: F403
