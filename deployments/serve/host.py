"""What a cluster needs of the host it runs on: free ports, the soft stop of HAProxy, the end of what is left. Knows no Ray."""

import contextlib
import fcntl
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from deployments.processes import end_all, processes_of, signal_all
from dpiframe_core.errors import ConfigError

WINDOW = 100
_STATES, _LOCK = Path("/tmp"), "launcher"
_ANSWER_S = 10.0
_ENDED_S = 5.0  # that killed processes are waited for
_PORTS = range(20_000, 32_000)  # below those that the kernel hands out for connections


def require_free_port(host: str, port: int, key: str = "http.port") -> None:
    """Raises ConfigError, about the configuration's `key`, if something listens there."""
    hint = "; try --port" if key == "http.port" else ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{key}: got {port} ({error.strerror}), expected a free port on {host}{hint}") from None


def require_listener(address: str) -> None:
    """Raises ConfigError if nobody listens at HOST:PORT, the address of a cluster: Ray itself would ask for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"address: got {address!r} ({error}), expected a Ray cluster to join") from None


def free_port_from(wished: int) -> int:
    """`wished` if nobody listens there on loopback, else some free port."""
    try:
        require_free_port("127.0.0.1", wished)
    except ConfigError:
        return free_ports(1)[0]
    return wished


def free_ports(count: int, window: int | None = None) -> list[int]:
    """Ports that nobody listens on, of a `window` that the caller has; else of windows that nobody has, where somebody else
    may take them before they are used.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS if window is None else range(window, window + WINDOW - 1))
        with socket.socket() as probe, socket.socket() as guard, contextlib.suppress(OSError):
            probe.bind(("", port))
            if window is None:
                guard.bind(("", port - port % WINDOW + WINDOW - 1))
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


@contextlib.contextmanager
def haproxy_stopped(state: Path, patience_s: float) -> Iterator[None]:
    """The soft stop of the HAProxy processes of `state`, beside what the block does: newcomers are refused at once, requests in
    flight are answered, then it exits; or is left alone, `patience_s` after the beginning.

    Deleting the application first, Serve's way, answers 404 for as long as the replicas drain, and ends in cut connections.
    """
    signal_all(state, signal.SIGUSR1, b"haproxy")
    give_up = time.monotonic() + patience_s
    yield
    while processes_of(state, b"haproxy") and time.monotonic() < give_up:
        time.sleep(0.02)


@contextlib.contextmanager
def held(state: Path) -> Iterator[None]:
    """Within the block nobody takes the processes of the directory `state` for left over."""
    with (state / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def end_leftovers() -> None:
    """Kills what killed launchers of this user have left: Serve's HAProxy, which would hold its port for good and answer 500.
    Logs stay.
    """
    for path in _STATES.glob(f"dpi-*/{_LOCK}"):
        with contextlib.suppress(OSError):  # its launcher holds it, it has just gone, or it is another user's
            if path.parent.stat().st_uid != os.getuid():
                continue
            with path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_all(path.parent, _ENDED_S)
