"""All that these tests of `http_api` claim, on the direct port: see this folder's conftest."""

from tests.deployments.http_api.test_arrow_body import *  # noqa: F403
from tests.deployments.http_api.test_gated import *  # noqa: F403
from tests.deployments.http_api.test_rude_clients import *  # noqa: F403
