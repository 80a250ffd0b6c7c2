"""`dpiframe serve` as a process of its own, and what becomes of requests when it is stopped under load."""

import collections
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import pytest

from tests import run_guard
from tests.deployments.own_ports import own_port

DPIFRAME = str(Path(sys.executable).with_name("dpiframe"))
# What nohup and a script's & do to a program: SIGINT means nothing to it, nor to what it starts.
IGNORING_SIGINT = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
_TIME_WAIT = "06"  # of a connection that the kernel alone remembers
STOP_S = 60  # it takes some seconds, on a busy host more; a stop that hangs takes longer


class Server:
    """`dpiframe serve` in a session of its own, so that a signal to its group is what Ctrl-C is in a terminal.

    Ends with its `with`: by SIGTERM to the command alone, or at once if the block fails. With `ignores_sigint` it is started as
    nohup does.
    """

    def __init__(
        self,
        bundle_or_config: Path,
        *options: str,
        ignores_sigint: bool = False,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or own_port()
        self.url = f"http://127.0.0.1:{self.port}"
        option = "--bundle" if bundle_or_config.is_dir() else "--config"
        command = [DPIFRAME, "serve", option, str(bundle_or_config), "--device", "cpu", "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            [*(IGNORING_SIGINT if ignores_sigint else ()), *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})},
        )  # fmt: skip
        self.output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.kill()
        elif self.process.poll() is None:
            assert self.stop(signal.SIGTERM, alone=True) == 0, self.output

    def wait_for(self, text: str) -> Self:
        """Until it says that."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return self
        pytest.fail(f"the server ended:\n{self.output}")

    def wait_ready(self) -> Self:
        return self.wait_for("metrics at")

    def stop(self, signum: signal.Signals, within_s: float = STOP_S, *, alone: bool = False) -> int:
        """Sends the signal to the whole group, or to the command alone, and waits; what it still says is added to `output`."""
        (os.kill if alone else os.killpg)(self.process.pid, signum)
        try:
            said, _ = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            running = "\n".join(self.processes().values())
            self.process.send_signal(signal.SIGABRT)  # has it tell where each of its threads is
            self.process.wait(5)
            said = self.kill()
            pytest.fail(f"no end within {within_s:g} s of the signal:\n{self.output}{said}\nStill running:\n{running}")
        self.output += said
        return self.process.returncode

    def kill(self) -> str:
        """Ends all of its processes at once; the last that they said."""
        run_guard.kill_all(lambda: set(self.processes()))
        said, _ = self.process.communicate()
        return said

    def processes(self) -> dict[int, str]:
        """Command lines of its session by process id: Ray's processes leave the process group, but not the session."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getsid(int(folder.name)) == self.process.pid:
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has just ended
                continue
        return {pid: command for pid, command in found.items() if command}

    def states(self) -> list[Path]:
        """Its state directory, as long as it has one."""
        return list(Path("/tmp").glob(f"dpi-{self.process.pid}-*"))


def score(url: str, body: bytes) -> httpx.Response:
    return httpx.post(f"{url}/v1/score", content=body, headers={"content-type": "application/json"}, timeout=30)


def begin(connection: http.client.HTTPConnection, body: bytes) -> bytes:
    """Sends the first half of a request to score: a replica has it then, and waits for the second, which is returned."""
    connection.putrequest("POST", "/v1/score")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders(body[: len(body) // 2])
    return body[len(body) // 2 :]


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def read_whole(*ports: int) -> list[set[int]]:
    """Of each port the ports of those clients whose bytes its server has read, all that they have sent so far."""
    unacknowledged: dict[int, int] = {}
    unread: dict[int, dict[int, bool]] = {port: {} for port in ports}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, queues, *_, inode = line.split(maxsplit=10)[:10]
        if state == _TIME_WAIT:
            continue
        here, there = (int(address.split(":")[1], 16) for address in (local, remote))
        to_send, to_read = (int(bytes_, 16) for bytes_ in queues.split(":"))
        if there in unread:
            unacknowledged[here] = to_send
        elif here in unread:
            unread[here][there] = bool(to_read) or inode == "0"  # nobody has accepted it yet
    return [{client for client, left in of.items() if not left and unacknowledged.get(client) == 0} for of in unread.values()]


def leave(connection: http.client.HTTPConnection) -> None:
    """Closes a connection that has its answer, or will get none, and the kernel forgets it at once: it would keep each of
    thousands for a minute, and who looks for connections would read them all."""
    if connection.sock is not None:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def outcomes_of_ctrl_c_under_load(server: Server, example: bytes, *ports: int) -> collections.Counter[str]:
    """Stops the server with at least four requests that it has read and not answered, and two of which it has read half. They
    are sent to `ports` in turn, by default HAProxy's.

    Counts "scored", "late" (scored requests of which half was sent after the stop), statuses and errors. Each request has a
    connection of its own. One that the server has not read by the stop may be cut: the kernel resets it with the listener.
    """
    ports = ports or (server.port,)
    request = json.loads(example)
    request["candidates"] = {name: column * 400 for name, column in request["candidates"].items()}
    body = json.dumps(request).encode()
    outcomes: collections.Counter[str] = collections.Counter()
    sent, half_sent = [0] * 8, [0] * 2  # by which of its ports
    stopped: list[set[int]] = []  # with these requests in its hands

    def client(me: int) -> None:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", ports[me % len(ports)], timeout=60)
            own = 0
            try:
                connection.connect()
                own = connection.sock.getsockname()[1]
                connection.request("POST", "/v1/score", body, {"content-type": "application/json"})
                sent[me] = own
                answer = connection.getresponse()
                scores = json.loads(answer.read())["scores"]
                outcomes["scored" if (answer.status, len(scores)) == (200, 2000) else str(answer.status)] += 1
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                if stopped and own not in stopped[0] and isinstance(error, ConnectionError):
                    return
                outcomes[repr(error)] += 1
            finally:
                sent[me] = 0
                leave(connection)

    def late_client(me: int) -> None:
        port = ports[me % len(ports)]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            rest = begin(connection, body)
            half_sent[me] = connection.sock.getsockname()[1]
            while listens(port):
                time.sleep(0.02)
            connection.send(rest)
            answer = connection.getresponse()
            outcomes["late" if len(json.loads(answer.read()).get("scores", ())) == 2000 else str(answer.status)] += 1
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcomes[f"late: {error!r}"] += 1
        finally:
            connection.close()

    def in_hand() -> set[int]:
        """Whole requests that the server has read and not answered, some at each port; none before it has read the halves."""
        before = {*sent}
        read = read_whole(*ports)
        found = [before & {*sent} & of_port for of_port in read]
        return set().union(*found) if {*half_sent} <= set().union(*read) and all(found) else set()

    clients = [threading.Thread(target=client, args=(i,)) for i in range(len(sent))]
    clients += [threading.Thread(target=late_client, args=(i,)) for i in range(len(half_sent))]
    for thread in clients:
        thread.start()
    held: set[int] = set()
    while not (outcomes["scored"] >= 16 and len(held) >= 4) and all(thread.is_alive() for thread in clients):
        time.sleep(0.001)
        held = in_hand()
    stopped.append(held)
    assert server.stop(signal.SIGINT) == 130
    for thread in clients:
        thread.join(60)
    return outcomes
