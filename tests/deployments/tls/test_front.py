"""Our HAProxy, real, before a plain HTTP server of this process: who speaks to it, what goes on, certificates that change."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest

from deployments.config import DeploymentConfig, parse_config
from deployments.tls import front
from deployments.tls.front import check_certificate, tls_front
from dpiframe_core.errors import ConfigError
from tests.deployments.own_ports import own_port
from tests.deployments.tls.certificates import certificate, openssl, trusting

WITHIN_S = 60.0


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked; for /slow, once it may."""

    protocol_version = "HTTP/1.1"
    may_answer = threading.Event()
    asked = threading.Semaphore(0)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/slow":
            self.asked.release()
            assert self.may_answer.wait(WITHIN_S)
        answer = json.dumps({"headers": {k.lower(): v for k, v in self.headers.items()}, "bytes": len(body)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Not to stderr."""


@pytest.fixture(scope="module")
def service() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def config(service: int, tmp_path: Path) -> Callable[..., DeploymentConfig]:
    """Of a front before the service, with a certificate of its own and whatever else is said."""

    def make(grpc_port: int | None = None, **more: object) -> DeploymentConfig:
        pem, key = certificate(tmp_path, "one")
        tls = {"host": "127.0.0.1", "port": own_port(), "certificate": str(pem), "key": str(key), **more}
        data: dict[str, object] = {"models": [{"path": "m"}], "http": {"port": service, "tls": tls}, "drain_s": 20}
        return parse_config(data if grpc_port is None else data | {"grpc": {"port": grpc_port}}, "test")

    return make


def url_of(config: DeploymentConfig, path: str = "/") -> str:
    assert config.http.tls is not None
    return f"https://localhost:{config.http.tls.port}{path}"


def name_shown(config: DeploymentConfig) -> str:
    """Whose certificate a new connection is shown."""
    assert config.http.tls is not None
    der = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", config.http.tls.port)))
    return next(name for name in ("one", "two") if name.encode() in der)


def test_a_request_by_tls_gets_the_plain_services_answer_and_says_who_asked(
    config: Callable[..., DeploymentConfig], tmp_path: Path
) -> None:
    made = config()
    with tls_front(made), httpx.Client(verify=trusting(tmp_path / "one.crt")) as client:
        body = bytes(1_000_000)
        answer = client.post(url_of(made), content=body, headers={"x-forwarded-for": "10.9.9.9", "authorization": "Bearer t"})
        assert (answer.status_code, answer.json()["bytes"]) == (200, len(body))
        sent = answer.json()["headers"]
        assert (sent["x-forwarded-proto"], sent["authorization"]) == ("https", "Bearer t")
        assert sent["x-forwarded-for"] == "127.0.0.1", "not what the client says of itself"


def test_http2_is_offered_and_old_versions_of_tls_are_refused(config: Callable[..., DeploymentConfig], tmp_path: Path) -> None:
    made = config()
    assert made.http.tls is not None
    with tls_front(made):
        context = trusting(tmp_path / "one.crt")
        context.set_alpn_protocols(["h2", "http/1.1"])
        address = ("127.0.0.1", made.http.tls.port)
        with socket.create_connection(address) as plain, context.wrap_socket(plain, server_hostname="localhost") as spoken:
            assert (spoken.selected_alpn_protocol(), spoken.version()) == ("h2", "TLSv1.3")
        said = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{made.http.tls.port}", "-tls1_1", "-cipher", "ALL:@SECLEVEL=0"],
            input=b"", capture_output=True, check=False,
        )  # fmt: skip
        assert said.returncode != 0
        assert b"alert protocol version" in said.stderr
        with pytest.raises(httpx.HTTPError):
            httpx.post(url_of(made).replace("https", "http"), content=b"x")


def test_clients_without_a_certificate_of_the_ca_are_refused_where_it_is_asked_for(
    config: Callable[..., DeploymentConfig], tmp_path: Path
) -> None:
    ca = certificate(tmp_path, "ca")
    pem, key = certificate(tmp_path, "client", signed_by=ca)
    other_pem, other_key = certificate(tmp_path, "other")
    made = config(client_ca=str(ca[0]))
    with tls_front(made):
        known = trusting(tmp_path / "one.crt")
        known.load_cert_chain(pem, key)
        assert httpx.post(url_of(made), content=b"x", verify=known).status_code == 200
        unknown = trusting(tmp_path / "one.crt")
        unknown.load_cert_chain(other_pem, other_key)
        for context in (unknown, trusting(tmp_path / "one.crt")):
            with pytest.raises(httpx.HTTPError):
                httpx.post(url_of(made), content=b"x", verify=context)


def test_grpc_goes_to_the_grpc_port(config: Callable[..., DeploymentConfig], tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        return b"scores of " + request

    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.method_handlers_generic_handler("t.T", {"Ask": grpc.unary_unary_rpc_method_handler(answer)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = config(grpc_port=port)
    assert made.http.tls is not None
    trusted = grpc.ssl_channel_credentials((tmp_path / "one.crt").read_bytes())
    with tls_front(made), grpc.secure_channel(f"localhost:{made.http.tls.port}", trusted) as channel:
        assert channel.unary_unary("/t.T/Ask")(b"rows", timeout=WITHIN_S) == b"scores of rows"
        assert httpx.post(url_of(made), content=b"x", verify=trusting(tmp_path / "one.crt")).status_code == 200
    server.stop(None).wait()


def test_a_certificate_that_changes_is_shown_and_a_broken_one_is_not(
    config: Callable[..., DeploymentConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deployments.tls.front._LOOK_S", 0.02)
    pem, key = certificate(tmp_path, "two")
    made = config()
    assert made.http.tls is not None
    with tls_front(made), httpx.Client(verify=trusting(tmp_path / "one.crt", pem)) as client:
        assert name_shown(made) == "one"
        Path(made.http.tls.certificate).write_text("no certificate")
        wait_until(lambda: "TLS stays as it was" in caplog.text)
        assert "http.tls.certificate: got" in caplog.text
        assert name_shown(made) == "one"
        Path(made.http.tls.certificate).write_bytes(pem.read_bytes())
        assert made.http.tls.key is not None
        Path(made.http.tls.key).write_bytes(key.read_bytes())
        wait_until(lambda: name_shown(made) == "two")
        assert client.post(url_of(made), content=b"x").status_code == 200


def test_a_request_in_flight_is_answered_after_the_block_and_newcomers_are_refused(
    config: Callable[..., DeploymentConfig], tmp_path: Path
) -> None:
    made = config()
    Echo.may_answer.clear()
    answers: list[int] = []
    front = tls_front(made)
    front.__enter__()

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            slow = httpx.post(url_of(made, "/slow"), content=b"x", verify=trusting(tmp_path / "one.crt"), timeout=WITHIN_S)
            answers.append(slow.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    assert Echo.asked.acquire(timeout=WITHIN_S)

    def answer_once_newcomers_are_refused() -> None:
        wait_until(lambda: refused(made))
        Echo.may_answer.set()

    answering = threading.Thread(target=answer_once_newcomers_are_refused)
    answering.start()
    front.__exit__(None, None, None)
    assert Echo.may_answer.is_set()
    for thread in (answering, asking):
        thread.join(WITHIN_S)
    assert answers == [200]


def test_headers_and_handshakes_that_come_byte_by_byte_are_cut_in_time(
    config: Callable[..., DeploymentConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 s are four here. A byte each tenth of a second never is a stall."""
    written = front.haproxy_file
    monkeypatch.setattr(front, "haproxy_file", lambda *given: re.sub(r"(?<= )30s", "4s", written(*given)))
    made = config()
    assert made.http.tls is not None
    address = ("127.0.0.1", made.http.tls.port)
    hello = bytes.fromhex("1603010200010001fc0303")

    def dripped(sock: socket.socket, data: bytes) -> bytes:
        """What came before the end."""
        sock.settimeout(0.1)
        give_up, got = time.monotonic() + WITHIN_S, b""
        for i in itertools.count():
            assert time.monotonic() < give_up
            with contextlib.suppress(TimeoutError):
                try:
                    sock.sendall(data[i % len(data) : i % len(data) + 1])
                    part = sock.recv(4096)
                except (ConnectionError, ssl.SSLError):
                    break
                if not part:
                    break
                got += part
        return got

    with tls_front(made):
        with socket.create_connection(address) as plain:
            dripped(plain, hello)
        with (
            socket.create_connection(address) as plain,
            trusting(tmp_path / "one.crt").wrap_socket(plain, server_hostname="localhost") as spoken,
        ):
            spoken.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
            assert dripped(spoken, b"y").startswith(b"HTTP/1.1 408 ")


def test_what_dies_is_started_anew_and_its_files_are_nobody_elses(
    config: Callable[..., DeploymentConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.tls.front._LOOK_S", 0.02)
    made = config()
    with tls_front(made):
        (folder,) = Path("/tmp").glob(f"dpitls-{os.getpid()}-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "certificate.pem").stat().st_mode) == 0o600
        for pid in haproxies(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        verify = trusting(tmp_path / "one.crt")

        def answered() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.post(url_of(made), content=b"x", verify=verify).status_code == 200
            return False

        wait_until(answered)
    assert not folder.exists()
    assert haproxies(folder) == []


def test_it_ends_with_a_launcher_that_is_killed(config: Callable[..., DeploymentConfig], tmp_path: Path) -> None:
    made = config()
    (tmp_path / "config.json").write_text(made.model_dump_json(exclude_unset=True))
    launcher = (
        "import sys, json, time; from deployments.config import parse_config; from deployments.tls.front import tls_front\n"
        "with tls_front(parse_config(json.load(open(sys.argv[1])), 'test')): print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", launcher, str(tmp_path / "config.json")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert not refused(made)
        process.kill()
    wait_until(lambda: refused(made))


def test_what_is_no_certificate_is_refused_by_its_key_in_the_configuration(
    config: Callable[..., DeploymentConfig], tmp_path: Path
) -> None:
    made = config().http.tls
    assert made is not None
    stranger = certificate(tmp_path, "stranger")[1]
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", str(stranger), "-aes256", "-passout", "pass:x", "-out", str(locked))
    for change, said in (
        ({"certificate": str(tmp_path / "none")}, r"http.tls.certificate: got '.*none', expected a file that can be read"),
        ({"key": str(stranger)}, r"http.tls.certificate: got '.*one.crt' \(KEY_VALUES_MISMATCH\), expected a PEM file"),
        ({"key": str(locked)}, r"http.tls.certificate: got '.*one.crt' \(.*\), expected .* no passphrase on the key"),
        ({"key": None}, r"http.tls.certificate: got '.*one.crt' \(.*\), expected a PEM file"),
        ({"client_ca": str(stranger)}, r"http.tls.client_ca: got '.*stranger.key' \(.*\), expected a PEM file of certificates"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_certificate(made.model_copy(update=change))


def test_a_port_that_is_taken_is_said_with_haproxys_reason(config: Callable[..., DeploymentConfig]) -> None:
    made = config()
    assert made.http.tls is not None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", made.http.tls.port))
        taken.listen()
        with pytest.raises(ConfigError, match=r"http.tls: got .*cannot bind socket.* expected it to listen"), tls_front(made):
            pytest.fail("started")


def refused(config: DeploymentConfig) -> bool:
    assert config.http.tls is not None
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", config.http.tls.port)) != 0


def haproxies(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def wait_until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.02)
