"""What a cluster needs of the host it runs on: free ports, the soft stop of HAProxy, the end of what is left. Knows no Ray."""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dpiframe_core.errors import ConfigError

WINDOW = 100
_PORTS = range(20_000, 32_000)  # below those that the kernel hands out for connections
_RAY_STOP_S = 3.0  # for Ray's own shutdown, which takes half of that on an idle host


def require_free_port(host: str, port: int, key: str = "http.port", hint: str = "; try --port") -> None:
    """Raises ConfigError, about the configuration's `key`, if something listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{key}: got {port} ({error.strerror}), expected a free port on {host}{hint}") from None


def free_port_from(wished: int) -> int:
    """`wished` if nobody listens there on loopback, else some free port."""
    try:
        require_free_port("127.0.0.1", wished)
    except ConfigError:
        return free_ports(1)[0]
    return wished


def cores() -> int:
    """That this process may run on: with taskset or in a cpuset, fewer than the host has."""
    return len(os.sched_getaffinity(0))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            if port not in found:
                found.append(port)
    return found


@contextlib.contextmanager
def port_windows(count: int) -> Iterator[list[int]]:
    """The first ports of so many windows of `WINDOW` ports that no other process of this host has as its own, for the block.

    Who has a window keeps its last port bound, which is therefore not for use.

    Raises:
        ConfigError: too few are left.
    """
    every = _PORTS[::WINDOW]
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for first in random.sample(every, len(every)):
            guard = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                guard.bind(("", first + WINDOW - 1))
                found.append(first)
            if len(found) == count:
                break
        else:
            raise ConfigError(f"ports: got {len(found)} free windows of {len(every)}, expected {count} for this service")
        yield found


def stop_haproxy(state: Path, patience_s: float) -> None:
    """The soft stop of the HAProxy processes of `state`: newcomers are refused at once, requests in flight are answered, then
    it exits; or is left alone after `patience_s`.

    Deleting the application first, Serve's way, answers 404 for as long as the replicas drain, and ends in cut connections.
    """
    for pid in _processes(state, b"haproxy"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    give_up = time.monotonic() + patience_s
    while _processes(state, b"haproxy") and time.monotonic() < give_up:
        time.sleep(0.02)


@contextlib.contextmanager
def killed_after(state: Path, patience_s: float = _RAY_STOP_S) -> Iterator[None]:
    """Kills the processes of `state` at the end of the block, and within it once it has lasted `patience_s`.

    For Ray's own shutdown: it waits for one process after another, on a busy host or disk for each of them long. Ray's agents
    take up to half a minute to notice that their node is gone.
    """
    timer = threading.Timer(patience_s, _kill, [state])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _kill(state)


def _kill(state: Path) -> None:
    for pid in _processes(state):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(state: Path, program: bytes = b"") -> list[int]:
    """Those whose environment names the directory `state`: a HAProxy that a reload has left to finish is among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = os.fsencode(state) + b"/" in (folder / "environ").read_bytes()
            if ours and (folder / "cmdline").read_bytes().split(b"\0")[0].endswith(program):
                found.append(int(folder.name))
    return found
