"""All that these tests of `serve` and `protocol` claim, on the direct port: see this folder's conftest."""

from tests.deployments.protocol.test_rest import *  # noqa: F403
from tests.deployments.serve.test_http_app import *  # noqa: F403
from tests.deployments.serve.test_multitask_app import *  # noqa: F403
