"""All that the files named here claim, on the direct port: see this folder's conftest."""

from tests.deployments.http_api.test_arrow_body import *  # noqa: F403
from tests.deployments.http_api.test_gated import *  # noqa: F403
from tests.deployments.http_api.test_score_list import *  # noqa: F403
from tests.deployments.serve.test_http_app import *  # noqa: F403
