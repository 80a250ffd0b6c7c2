"""The listener in C (`native/listener.c`): built, loaded and set up within a deployment's limits."""

import resource
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from deployments.config import Limits
from deployments.fanin.handshake import Agreement
from deployments.fanin.request_memory import RequestMemory
from deployments.fanin.rings import Rings
from deployments.http_api.request_body import slow_body
from deployments.metrics import LATENCY_BOUNDS_MS
from deployments.scoring.faults import Words
from dpiframe_core.errors import ConfigError, DPIFrameError, TooLarge
from kernels.runtime import c_build

GONE, LONG, SLOW = "gone", "long", "slow"  # faults whose request's head is known; others begin with a status

_MOST_CONNECTIONS = 4096  # of one process: as many as HAProxy takes
_OTHER_DESCRIPTORS = 512  # that a process has for bundles, rings, Ray and its log
_HELD_BYTES = 256 * 2**20  # of requests that are not whole yet, and of answers that are not read yet; beyond that, 503
HEAD_MS, _IDLE_MS = 30_000, 75_000
_NATIVE = ("listener.c", "arrivals.c", "connection.c", "express.c", "asks.c", "counts.c", "form.c", "http_head.c")


class Received(NamedTuple):
    """A request as the listener gives it. `fault`: why its body is not there, if it is not.

    Attributes:
        key: for its answer. head: its request line and headers, but for the lines `apart`, which differ from one to the next.
        close: the connection ends with its answer.
    """

    key: int
    head: bytes
    apart: bytes
    body: bytes
    close: bool
    fault: str | None


def body_fault(fault: str, limits: Limits) -> DPIFrameError:
    """What to say to a client whose body is `LONG` or `SLOW`."""
    if fault == SLOW:
        return slow_body(limits)
    most = f"{limits.max_body_bytes} bytes"
    return TooLarge("body", Words(f"more than {most}"), f"at most {most}")


class Listener(Protocol):
    """Connections, and the requests on them; `fileno` is readable when a round may find something. See `listener.c`."""

    most: int
    open: int
    due: int
    ended_count: int

    def fileno(self) -> int: ...
    def accept(self, listening: int, most: int, /) -> list[int]: ...
    def add(self, fds: Sequence[int], /) -> int: ...
    def round(self) -> list[tuple[int, bytes, bytes, bytes, bool, str | None]]: ...
    def answer(self, answers: Sequence[tuple[int, bytes, bool]], /) -> bool: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def date(self, line: bytes, /) -> None: ...
    # What `express` has C answer; see express.c.
    def learn(
        self, head: bytes, envelope: bytes, body_bytes: int, known: object, rings: list["EngineRing"], *how: Any
    ) -> None: ...
    def forget(self) -> None: ...
    def attach(self, ring: "EngineRing", /) -> bool: ...
    def detach(self, ring: "EngineRing", /) -> None: ...
    def ended(self) -> list[tuple[Any, ...]]: ...
    def seen(self) -> tuple[list[tuple[Any, bytes]], list[tuple[Any, bytes, bytes]]]: ...


class EngineRing(Protocol):
    """C's own connection to an engine. `open`: slots that the engine has not given back. See `engine_ring.c`."""

    open: int


def most_connections(listeners: int = 1) -> int:
    """Of each, as many as leave descriptors for all else: who has none left can load no model. Raises this process's limit."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wished = listeners * _MOST_CONNECTIONS + _OTHER_DESCRIPTORS
    if 0 <= limit < wished:  # below 0: there is no limit
        limit = wished if hard < 0 else min(hard, wished)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return min(_MOST_CONNECTIONS, max(limit // 2, limit - _OTHER_DESCRIPTORS) // listeners) if limit >= 0 else _MOST_CONNECTIONS


def open_listener(limits: Limits, connections: int | None = None) -> Listener:
    """
    Args:
        connections: by default `most_connections`.

    Raises:
        ConfigError: it cannot be built here.
    """
    most = most_connections() if connections is None else connections
    body_ms = round(limits.max_body_s * 1e3)
    held = max(_HELD_BYTES, 2 * limits.max_body_bytes)
    bounds = array("d", LATENCY_BOUNDS_MS).tobytes()
    return cast(Listener, _module().Listener(most, limits.max_body_bytes, held, HEAD_MS, body_ms, _IDLE_MS, bounds))


def open_ring(agreed: Agreement, beside: Rings, memory: RequestMemory, slot_bytes: int) -> EngineRing:
    """`beside`: of Python's own connection to the engine. The descriptors stay the caller's."""
    rings, welcome = agreed.rings, agreed.welcome
    memories = rings.memory, beside.memory, Rings.ENTRIES, agreed.board.line, memory.mapped
    rows = welcome.max_queued_rows, welcome.max_batch_rows
    return cast(EngineRing, _module().EngineRing(*memories, slot_bytes, *rows, agreed.answer_fd, agreed.wake_fd))


def _module() -> Any:
    here = Path(__file__).parent
    sources = [*(here / "native" / name for name in _NATIVE), here.parent / "fanin" / "engine_ring.c"]
    module = c_build.extension("deployments.direct.listener_c", sources, "the direct port")
    if module is None:
        raise ConfigError("http.direct_port: got no listener, expected a C compiler and Python's headers (see the log)")
    return module
