"""The application's metrics of all its processes, as one Prometheus page: what Ray's endpoint on each node says of it.

A replica knows its own figures only, and HAProxy picks which replica answers. Ray's endpoint of a node has those of all of the
node's processes. Knows no Ray: it is told where the endpoints are.
"""

import asyncio
import http.client
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dpiframe_core.errors import Unavailable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Ray's processes report every ten seconds, and a node takes 60 ms of a core to write its page: a page may be this old.
_KEPT_S = 5.0
_PATIENCE_S = 3.0
_MOST_BYTES = 64 * 2**20  # of one node's page: Ray's own metrics grow with its processes
_MOST_AT_ONCE = 16
_OURS = re.compile(rb"^(# (?:HELP|TYPE) )?(ray_dpiframe_\w+)(.*)\n", re.MULTILINE)
_LOST = "ray_dpiframe_unreachable_nodes"


class Endpoint(NamedTuple):
    """Where a node's page is: `/metrics` at this address."""

    host: str
    port: int


class NodeMetrics:
    """Answers `page` for one application. `endpoints`, which may block, names the nodes that there are now."""

    def __init__(
        self, application: str, endpoints: Callable[[], Sequence[Endpoint]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mark = f'application="{application}"'.encode()
        self._endpoints, self._clock = endpoints, clock
        self._lock = asyncio.Lock()
        self._page = b""
        self._until = float("-inf")

    async def page(self) -> bytes:
        """In Prometheus' text format, at most `_KEPT_S` old: any number of askers cost the nodes one page in that time.

        Raises:
            Unavailable: no node answers.
        """
        async with self._lock:
            if self._clock() >= self._until:
                self._page = await asyncio.to_thread(self._gather)
                self._until = self._clock() + _KEPT_S
            return self._page

    def _gather(self) -> bytes:
        endpoints = self._endpoints()
        with ThreadPoolExecutor(min(len(endpoints), _MOST_AT_ONCE) or 1, "node-metrics") as pool:
            pages = list(pool.map(_fetched, endpoints))
        found = [page for page in pages if page is not None]
        if not found:
            raise Unavailable(f"metrics: got no answer from Ray's endpoints on {len(endpoints)} nodes, expected one")
        return application_page(found, self._mark, len(pages) - len(found))


def application_page(pages: Sequence[bytes], mark: bytes, lost: int) -> bytes:
    """Our metrics of the pages of several nodes, each family once, with the series that hold `mark`, a label and its value.

    A quote in a label's value is escaped, so that nothing but the label itself can look like `mark` behind `{` or `,`.
    """
    families: dict[bytes, tuple[dict[bytes, None], list[bytes]]] = {}
    marks = (b"{" + mark, b"," + mark)
    for page in pages:
        described: tuple[dict[bytes, None], list[bytes]] = ({}, [])
        for line in _OURS.finditer(page):
            if line[1]:
                described = families.setdefault(line[2], ({}, []))
                described[0][line[0]] = None
            elif any(m in line[3] for m in marks):
                described[1].append(line[0])
    lines = [b"".join((*about, *series)) for about, series in families.values() if series]
    lines.append(f"# HELP {_LOST} Nodes whose metrics are not in this page.\n# TYPE {_LOST} gauge\n{_LOST} {lost}\n".encode())
    return b"".join(lines)


def _fetched(endpoint: Endpoint) -> bytes | None:
    """A node's page; None if it does not come. Not through urllib, which would ask a proxy that the environment names."""
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        page = answer.read(_MOST_BYTES + 1)
        return page if answer.status == 200 and len(page) <= _MOST_BYTES else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
