"""All that `serve.test_http_app` and `http_api.test_gated` and `test_arrow_body` claim, on the direct port: see conftest."""

from tests.deployments.http_api.test_arrow_body import *  # noqa: F403
from tests.deployments.http_api.test_gated import *  # noqa: F403
from tests.deployments.serve.test_http_app import *  # noqa: F403
