"""The name by which Ray imports our middlewares: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.front.middlewares`."""

from deployments.http_api.serve_bypass import middlewares

__all__ = ["middlewares"]
