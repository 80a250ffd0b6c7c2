"""A typed client of the service, sync and async: columns in, float32[n, tasks] out, over the protocol's binary form.

Owns connections; a request and its tries are `call`'s. Knows no server: it needs NumPy and httpx only.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import httpx
import numpy as np
import numpy.typing as npt

from deployments.client.call import Call, ClientError, Retry, Wait, bearer, segment
from deployments.client.columns import Column, WireTensor, array_tensors, joined_tensors, raw_tensors
from deployments.client.frames import Candidates, columns_of
from deployments.client.scores import Scores

__all__ = ["AsyncClient", "Client", "ClientError", "Retry", "Scores"]

Request: TypeAlias = tuple[Candidates, Mapping[str, object]]  # candidates and context of one user
_RETRY = Retry()
_LIMITS = httpx.Limits(max_connections=None)


class _Requests:
    """What both clients share: where requests go and what they look like."""

    def __init__(self, model: str, version: str | None, retry: Retry, timeout_s: float) -> None:
        self._path = f"/v2/models/{segment(model)}" + (f"/versions/{segment(version)}" if version else "") + "/infer"
        self._retry = retry
        self._timeout_s = timeout_s

    def call(
        self, tensors: list[WireTensor], rows: int | None, deadline_s: float | None, priority: int, *, encoded: bool = False
    ) -> Call:
        parameters: dict[str, object] = {"priority": priority} if priority else {}
        if encoded:
            parameters["encoded"] = True
        return Call(self._path, tensors, parameters, deadline_s, self._timeout_s, self._retry, rows)


def _split(scores: Scores, rows: Sequence[int]) -> list[Scores]:
    return [part.view(Scores) for part in np.split(scores, np.cumsum(rows)[:-1])]


def _in_columns(requests: Sequence[Request]) -> list[tuple[Mapping[str, Column], Mapping[str, object]]]:
    return [(columns_of(rows, f"requests[{i}] candidates"), context) for i, (rows, context) in enumerate(requests)]


def _where(url: str) -> tuple[str, str | None]:
    """The URL that requests are relative to, and the path of the Unix socket that takes them, if it is one.

    Raises:
        ValueError: its path is not absolute.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "unix":
        return url, None
    path, _, prefix = rest.partition(":")
    if not path.startswith("/") or (prefix and not prefix.startswith("/")):
        raise ValueError(f"url: got {url!r}, expected unix:///PATH, or unix:///PATH:/PREFIX")
    return f"http://localhost{prefix}", path


class Client:
    """Keeps its connections; may be shared by threads. Close it, or use it in a `with`."""

    def __init__(
        self,
        url: str,
        model: str,
        version: str | None = None,
        *,
        retry: Retry = _RETRY,
        timeout_s: float = 30.0,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`url`: http://HOST:PORT, or unix://PATH of a service's `http.direct_socket`, with :/PREFIX behind it if it has one.

        `timeout_s` bounds a try that has no deadline. `token`: by default that of the environment, DPIFRAME_TOKEN.
        """
        self._requests = _Requests(model, version, retry, timeout_s)
        base, socket_path = _where(url)
        if transport is None and socket_path is not None:
            transport = httpx.HTTPTransport(uds=socket_path, limits=_LIMITS)
        self._http = httpx.Client(base_url=base, transport=transport, headers=bearer(token), limits=_LIMITS)

    def score(
        self,
        candidates: Candidates,
        context: Mapping[str, object] | None = None,
        *,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> Scores:
        """Scores n candidates by raw values.

        Args:
            candidates: a column of n values for each feature: an array, or a list in which None is missing; a list of lists, or
                a two-dimensional array, for a feature of several values. Or a list of n dicts; or a pandas or polars
                DataFrame, a pyarrow Table or RecordBatch.
            context: one value (or list) for each feature that all candidates share.
            deadline_s: from now, all tries included; the service drops what has not reached its device by then. A service that
                stops answering is noticed then, or, if it had not even taken the connection, after up to as long again.

        Returns:
            float32[n, tasks], an array that says how many ids were scored as unknown ones, as their rows were late.

        Raises:
            ClientError: the service refused, or could not be reached in time.
            ValueError: a column cannot be sent as it is.
        """
        return self._run(self._requests.call(*raw_tensors(columns_of(candidates), context), deadline_s, priority))

    def score_encoded(
        self, tensors: Mapping[str, npt.NDArray[Any]], *, deadline_s: float | None = None, priority: int = 0
    ) -> Scores:
        """Scores ids and model-ready numbers: the four sections (docs/protocol.md), or one array a feature. Else as `score`."""
        sections = tensors.keys() <= _SECTIONS
        return self._run(self._requests.call(array_tensors(tensors), None, deadline_s, priority, encoded=not sections))

    def score_together(
        self, requests: Sequence[Request], *, deadline_s: float | None = None, priority: int = 0
    ) -> list[Scores]:
        """Scores the candidates of several users by one request: what `score` would give for each (candidates, context).

        All have the same columns in their candidates and the same features in their context. What is wrong with one is refused
        for all of them. Else as `score`.
        """
        tensors, rows = joined_tensors(_in_columns(requests))
        scores = self._run(self._requests.call(tensors, sum(rows), deadline_s, priority))
        return _split(scores, rows)

    def ready(self) -> bool:
        return self._http.get("/v2/health/ready").status_code == 200

    def _run(self, call: Call) -> Scores:
        while True:
            got: httpx.Response | httpx.TransportError
            try:
                got = self._http.post(**call.build())
            except httpx.TransportError as error:
                got = error
            settled = call.settled(got)
            if not isinstance(settled, Wait):
                return settled
            time.sleep(settled.seconds)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """`Client` for an event loop. Cancelling a call closes its connection, and the service drops the request."""

    def __init__(
        self,
        url: str,
        model: str,
        version: str | None = None,
        *,
        retry: Retry = _RETRY,
        timeout_s: float = 30.0,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._requests = _Requests(model, version, retry, timeout_s)
        base, socket_path = _where(url)
        if transport is None and socket_path is not None:
            transport = httpx.AsyncHTTPTransport(uds=socket_path, limits=_LIMITS)
        self._http = httpx.AsyncClient(base_url=base, transport=transport, headers=bearer(token), limits=_LIMITS)

    async def score(
        self,
        candidates: Candidates,
        context: Mapping[str, object] | None = None,
        *,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> Scores:
        """As `Client.score`."""
        return await self._run(self._requests.call(*raw_tensors(columns_of(candidates), context), deadline_s, priority))

    async def score_encoded(
        self, tensors: Mapping[str, npt.NDArray[Any]], *, deadline_s: float | None = None, priority: int = 0
    ) -> Scores:
        """As `Client.score_encoded`."""
        sections = tensors.keys() <= _SECTIONS
        return await self._run(self._requests.call(array_tensors(tensors), None, deadline_s, priority, encoded=not sections))

    async def score_together(
        self, requests: Sequence[Request], *, deadline_s: float | None = None, priority: int = 0
    ) -> list[Scores]:
        """As `Client.score_together`."""
        tensors, rows = joined_tensors(_in_columns(requests))
        scores = await self._run(self._requests.call(tensors, sum(rows), deadline_s, priority))
        return _split(scores, rows)

    async def ready(self) -> bool:
        return (await self._http.get("/v2/health/ready")).status_code == 200

    async def _run(self, call: Call) -> Scores:
        while True:
            got: httpx.Response | httpx.TransportError
            try:
                got = await self._http.post(**call.build())
            except httpx.TransportError as error:
                got = error
            settled = call.settled(got)
            if not isinstance(settled, Wait):
                return settled
            await asyncio.sleep(settled.seconds)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


_SECTIONS = {"context_ids", "candidate_ids", "context_dense", "candidate_dense"}
