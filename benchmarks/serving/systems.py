"""The servers that suite `serving` compares, as data, and how one is started and stopped. Knows no load and no figures."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import httpx

from deployments.serve.host import free_ports

_STARTS_WITHIN_S = 180
_STOPS_WITHIN_S = 20
_SETTLES_WITHIN_S = 20
_QUIET = 0.6  # of a core: Ray's own processes take some of one all the time


@dataclass(frozen=True)
class Peer:
    """A server of somebody else's.

    Attributes:
        probe: code that raises, with the reason, where it cannot run.
        wrapped, batched: see `Payloads.bodies`. lacks: forms that it takes no requests in, and why.
        extra: it is not among this project's own packages.
    """

    name: str
    probe: str
    program: str
    path: str = "/score"
    wrapped: bool = False
    batched: bool = False
    lacks: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    extra: bool = True

    def command(self, python: str, bundle: Path, port: int, device: str, form: str) -> list[str]:
        return [python, "-m", f"benchmarks.serving.peers.{self.program}", str(bundle), str(port), device, form]


_NO_BINARY = "its own API takes no raw binary body"
_STOCK_RAY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0", "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
}  # fmt: skip
_TRITON = """import numpy, importlib.util
if int(numpy.__version__[0]) > 1:
    raise RuntimeError("triton: the Python backend of its last wheel is built for NumPy 1")
if importlib.util.find_spec("pytriton") is None:
    raise RuntimeError("triton: nvidia-pytriton, whose wheel has its program, is not installed")
"""
PEERS = {
    peer.name: peer
    for peer in (
        Peer("ray-serve", "import ray", "ray_serve", "/{form}", environment=_STOCK_RAY, extra=False),
        Peer("uvicorn", "import uvicorn", "uvicorn_fastapi", extra=False),
        Peer("mosec", "import mosec", "mosec_worker"),
        Peer("mosec-2", "import mosec", "mosec_worker", environment={"PEER_WORKERS": "2"}),
        Peer("litserve", "import litserve", "litserve_api", lacks={"binary": _NO_BINARY}),
        Peer("bentoml", "import bentoml", "bento_service", wrapped=True, lacks={"binary": _NO_BINARY}),
        Peer("triton", _TRITON, "triton_server", "/v2/models/demo/infer", batched=True),
    )
}  # fmt: skip
FANIN, DIRECT, FANIN_DIRECT, UNIX = "dpiframe-fanin", "dpiframe-direct", "dpiframe-fanin-direct", "dpiframe-unix"
OURS = (
    "dpiframe",
    FANIN,
    DIRECT,
    FANIN_DIRECT,
    UNIX,
)  # both topologies by HAProxy and by the direct port, one by a Unix socket
SYSTEMS = (*OURS, *PEERS)


def python_of(peer: Peer, given: str) -> str:
    """The interpreter for a peer. given: "PATH,NAME=PATH": for all that this project does not install, and for single peers."""
    parts = [part for part in given.split(",") if part]
    own = dict(part.split("=", 1) for part in parts if "=" in part)
    usual = next((part for part in parts if "=" not in part), sys.executable)
    return own.get(peer.name, usual if peer.extra else sys.executable)


def missing(peer: Peer, python: str) -> str | None:
    """Why the peer cannot run here, if it cannot."""
    tried = subprocess.run([python, "-c", peer.probe], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["no reason given"])[-1]


@dataclass(frozen=True)
class Running:
    """A server's process, its port, and the file that takes what it prints. `at`: where its load goes, if not to that port."""

    process: subprocess.Popen[bytes]
    port: int
    said: IO[bytes]
    at: int | Path | None = None

    @property
    def loaded(self) -> int | Path:
        return self.port if self.at is None else self.at

    @property
    def last_words(self) -> str:
        self.said.seek(0)
        return self.said.read()[-3000:].decode(errors="replace")


def our_config(system: str, bundle: Path, device: str, gpus: int, ingress: int) -> dict[str, Any]:
    """A deployment of one replica a GPU; fan-in with so many ingress replicas for each of them."""
    config: dict[str, Any] = {"models": [{"path": str(bundle.absolute()), "name": "demo"}], "device": device, "replicas": gpus}
    if system in (DIRECT, FANIN_DIRECT):
        config["http"] = {"direct_port": free_ports(1)[0]}
    if system == UNIX:
        config["http"] = {"direct_socket": tempfile.mktemp(prefix="dpiframe-", suffix=".sock", dir="/tmp")}
    if system in (FANIN, FANIN_DIRECT):
        config |= {"topology": "fanin", "ingress_replicas": gpus * ingress}
    return config


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Has this process, and what it starts meanwhile, run on the first `count` of its cores; on all of them with 0.

    Raises:
        ValueError: it has fewer.
    """
    before = os.sched_getaffinity(0)
    if count > len(before):
        raise ValueError(f"cores: got {count}, expected at most {len(before)}, which this process has")
    os.sched_setaffinity(0, sorted(before)[:count] if count else before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def our_server(config: dict[str, Any], environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """`dpiframe serve` with that configuration, and more in its environment."""
    (port,) = free_ports(1)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)  # JSON is YAML
        file.flush()
        command = [sys.executable, "-c", "from deployments.cli.main import app; app()", "serve", "--config", file.name]
        http = config.get("http", {})
        at = http.get("direct_port") or (Path(http["direct_socket"]) if "direct_socket" in http else None)
        with process([*command, "--port", str(port)], port, environment) as running:
            yield replace(running, at=at)


@contextmanager
def process(command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """A server in a session of its own."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(environment or {})
    with tempfile.TemporaryFile() as said:
        running = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=settings, start_new_session=True)
        try:
            yield Running(running, port, said)
        finally:
            _stop(running)


def _stop(running: subprocess.Popen[bytes]) -> None:
    running.terminate()
    with suppress(subprocess.TimeoutExpired):
        running.wait(_STOPS_WITHIN_S)
    with suppress(ProcessLookupError):  # workers that outlive their parent would share the next server's cores
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def first_answer(server: Running, path: str, headers: dict[str, str], body: bytes) -> httpx.Response:
    """The first good answer to a request, tried until the server is up.

    Raises:
        RuntimeError: it ended, refuses the request, or did not answer in time.
    """
    give_up, seen = time.monotonic() + _STARTS_WITHIN_S, "nothing"
    while time.monotonic() < give_up and server.process.poll() is None:
        try:
            at = server.loaded
            url = f"http://127.0.0.1:{at if isinstance(at, int) else server.port}{path}"
            transport = None if isinstance(at, int) else httpx.HTTPTransport(uds=str(at))
            with httpx.Client(transport=transport, timeout=30) as client:
                answer = client.post(url, content=body, headers=headers | {"Accept-Encoding": "identity"})
            if answer.status_code == 200:
                return answer
            seen = f"status {answer.status_code} {answer.text[:300]}"
            if answer.status_code in (400, 405, 415, 422):
                break
        except httpx.HTTPError as error:
            seen = repr(error)
        time.sleep(0.2)
    raise RuntimeError(f"{path}: got {seen}, expected status 200 within {_STARTS_WITHIN_S} s")


def settle(server: Running) -> None:
    """Returns once the server's processes leave the CPU alone, or after some seconds.

    A cluster answers before all its workers are up: on 32 cores they then took half of them for seconds more.
    """
    give_up, before = time.monotonic() + _SETTLES_WITHIN_S, cpu_s(server)
    while time.monotonic() < give_up:
        time.sleep(1)
        now = cpu_s(server)
        if now - before < _QUIET:
            return
        before = now


def processes_of_session(session: int) -> Iterator[tuple[int, str]]:
    """(process id, its program or title) of those alive."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if os.getsid(int(folder.name)) == session:
                yield int(folder.name), (folder / "cmdline").read_text().split("\0")[0]


def cpu_s(server: Running) -> float:
    """Seconds of CPU time of the server's processes that are alive."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = process.read_text().rpartition(")")[2].split()
            if int(fields[3]) == server.process.pid:  # its session
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
