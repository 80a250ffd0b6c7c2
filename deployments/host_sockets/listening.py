"""The sockets that clients of the direct port connect to: one of TCP, one of a file, or both."""

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dpiframe_core.errors import ConfigError

_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Port:
    """A port of TCP."""

    host: str
    port: int

    @property
    def name(self) -> tuple[str, int]:
        """That of a socket that listens here."""
        return self.host, self.port

    def listen(self) -> socket.socket:
        """Raises OSError, with EADDRINUSE if somebody listens here."""
        listening = socket.create_server((self.host, self.port), backlog=_BACKLOG)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each connection that it accepts has it from here
        return listening

    def left(self) -> None:
        """Nothing of it stays."""

    def refusal(self, error: OSError) -> ConfigError:
        return ConfigError(f"http.direct_port: got {self.port} ({error.strerror}), expected a free port")


@dataclass(frozen=True, slots=True)
class SocketFile:
    """A Unix socket at a path, for this user alone, or for a group too. Its file is made anew when nobody listens there."""

    path: str
    group: str | None = None

    @property
    def name(self) -> str:
        return self.path

    def listen(self) -> socket.socket:
        """Raises OSError, as `Port.listen`; ConfigError if there is no such group."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            with _locked(self.path):
                self._remove_if_dead()
                listening.bind(self.path)
                os.chmod(self.path, 0o600)  # nobody can connect before it listens
                if self.group is not None:
                    os.chown(self.path, -1, group_id(self.group))
                    os.chmod(self.path, 0o660)
                listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return listening

    def check(self) -> None:
        """Raises ConfigError if it cannot be had now."""
        try:
            self.listen().close()
        except OSError as error:
            raise self.refusal(error) from None
        self.left()

    def left(self) -> None:
        """Removes the file if nobody listens there any more."""
        with contextlib.suppress(OSError), _locked(self.path):
            self._remove_if_dead()

    def refusal(self, error: OSError) -> ConfigError:
        rule = "a path below a folder of this user, at which there is nothing or a socket that nobody listens at"
        return ConfigError(f"http.direct_socket: got {self.path} ({error.strerror}), expected {rule}")

    def _remove_if_dead(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise FileExistsError(errno.EEXIST, "no socket lies there")
            with socket.socket(socket.AF_UNIX) as caller:
                caller.setblocking(False)
                try:
                    caller.connect(self.path)
                except ConnectionRefusedError:
                    os.unlink(self.path)
                except BlockingIOError:  # so many wait that one more finds no room
                    pass


Place = Port | SocketFile


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Alone among those who look at a socket of this folder and remove it. Raises BlockingIOError if another one is."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(folder)


def group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"http.direct_socket_group: got {name!r}, expected a group of this host") from None
