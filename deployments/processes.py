"""Processes of this host: how many threads ours may have, and those of a private Ray cluster, which it may leave behind."""

import contextlib
import faulthandler
import fcntl
import gc
import logging
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_STDERR = 2
_ORPHAN_S = 5.0  # in which Serve and HAProxy learn that a node is lost, and its replicas still answer
_LOOK_S = 1.0
_MOST_PROXY_THREADS = 64  # of a group, and there is one
_DESCRIPTORS = 8_704  # as many as the listeners of a process, or a HAProxy of 4,096 clients, may need
_RAY_STOP_S = 3.0  # for Ray's own shutdown, which takes half of that on an idle host


def proxy_threads(cores: int) -> int:
    """Of a HAProxy that may use so many cores: three for eight, as a binary request takes it about as long as it takes an
    ingress and the engine together; two at least, one alone where a second would take time from the few cores, and no more than
    it starts with.
    """
    return min(max(1 if cores < 4 else 2, cores * 3 // 8), _MOST_PROXY_THREADS)


def gc_seldom() -> None:
    """For a process that begins: to look for garbage in what it imports, again and again, takes up to a seventh of importing
    Ray Serve.
    """
    gc.set_threshold(20_000, 20, 20)  # Python's own: 700, 10, 10


def make_room_for_descriptors() -> None:
    """Opens one descriptor with a high number, for good: the kernel's table of this process then has a place for all below it.

    Else it starts with 64 to 256 places and is doubled as connections come. Who needs a descriptor in a process with threads
    then waits until the kernel has let go of the old table (RCU). On a host of 16 cores that takes 15 to 30 ms each time, in
    which a HAProxy that was just started answers nobody. A child starts with places up to the highest number of its parent's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard >= 0 else _DESCRIPTORS  # below 0: there is no limit
    wanted = min(most, _DESCRIPTORS)
    with contextlib.suppress(OSError):  # it is not open yet
        os.fstat(wanted - 1)
        return
    with (
        contextlib.suppress(OSError),
        open(os.devnull, "rb") as null,
    ):  # a process without it is slower at times, and that is all
        if 0 <= soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        try:
            fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, wanted - 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def killed_after(state: Path, patience_s: float = _RAY_STOP_S) -> Iterator[None]:
    """Kills the processes of `state` at the end of the block, and within it once it has lasted `patience_s`.

    For Ray's own shutdown: it waits for one process after another, on a busy host or disk for each of them long. Ray's agents
    take up to half a minute to notice that their node is gone.
    """
    timer = threading.Timer(patience_s, signal_all, [state, signal.SIGKILL])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal_all(state, signal.SIGKILL)


def end_soon(within_s: float) -> None:
    """Says on stderr where every thread is, and kills this process after so many seconds: nothing can hold that up."""
    faulthandler.dump_traceback(_STDERR)
    timer = threading.Timer(within_s, os.kill, [os.getpid(), signal.SIGKILL])
    timer.daemon = True
    timer.start()


def end_without_raylet() -> None:
    """Kills this process, if a raylet has started it, so long after that has ended. A raylet that dies, or that Ray has given
    up, leaves its workers behind: nobody would know them, and their GPU would stay taken.
    """
    parent = os.getppid()
    if Path(f"/proc/{parent}/comm").read_text() != "raylet\n":
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        log.critical("the raylet is gone: this process ends in %g s", _ORPHAN_S)
        time.sleep(_ORPHAN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="raylet-watch", daemon=True).start()


def signal_all(state: Path, signum: signal.Signals, program: bytes = b"") -> None:
    """Signals the processes of `state`."""
    for pid in processes_of(state, program):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def end_all(state: Path, within_s: float) -> None:
    """Kills the processes of `state`, those too that they start meanwhile. Returns when they have given back what they had,
    their ports among it, or after so many seconds. One that is no longer found in /proc may have its ports for a second still.
    """
    give_up = time.monotonic() + within_s
    while (pids := processes_of(state)) and time.monotonic() < give_up:
        for fd in [fd for fd in map(_killed, pids) if fd is not None]:
            end = select.poll()
            end.register(fd, select.POLLIN)
            end.poll(max(0.0, give_up - time.monotonic()) * 1e3)
            os.close(fd)


def _killed(pid: int) -> int | None:
    """A descriptor that can be read when the process has ended; None: it has just done so."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    return fd


def processes_of(state: Path, program: bytes = b"") -> list[int]:
    """Those of the directory `state`: a HAProxy that a reload has left to finish is among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (folder / "cmdline").read_bytes().split(b"\0")[0]
            if title.endswith(program) and _is_of(folder, title, f"{state}/"):
                found.append(int(folder.name))
    return found


def _is_of(folder: Path, title: bytes, state: str) -> bool:
    """Whether a process's environment names `state`. Ray writes its titles over part of that, each start another part: what
    has such a title may have a file of `state` open instead.
    """
    if os.fsencode(state) in (folder / "environ").read_bytes():
        return True
    return title.startswith(b"ray::") and any(os.readlink(fd).startswith(state) for fd in (folder / "fd").iterdir())
