"""Lets ingresses in to an engine process and notices when they go: one thread that is idle but for that."""

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import MutableMapping

from deployments.fanin import handshake
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.handshake import Hello, Welcome
from deployments.fanin.peer import Peer
from dpiframe_core.errors import Unavailable

log = logging.getLogger(__name__)

_FULL_S = 0.1  # until the next try to let somebody in, when this process had no descriptor left


class _Refused(Exception):
    """An ingress that asks for what is not here."""


class Acceptor:
    """Listens in `place` for ingresses of `models`, by the name that both ends have for one. More of them may come."""

    def __init__(self, place: str, models: MutableMapping[str, FanInBatcher]) -> None:
        self._models = models
        self._joining = threading.Lock()
        self._listener = handshake.listen(place)
        self._signal = os.eventfd(0, os.EFD_CLOEXEC)
        self._shut, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="fanin-acceptor", daemon=True)
        self._thread.start()

    def close(self, drain_s: float) -> None:
        """Lets nobody in any more, and closes all batchers (see `FanInBatcher.close`); those who stayed learn it at the end."""
        os.eventfd_write(self._signal, 1)
        while not self._shut.wait(0.1) and self._thread.is_alive():
            pass
        # Only now do the batchers ask ingresses to leave: those look for another engine, and would find this one again.
        closing = [threading.Thread(target=batcher.close, args=(drain_s,)) for batcher in self._models.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._ended = True
        os.eventfd_write(self._signal, 1)
        self._thread.join()
        os.close(self._signal)

    def remove(self, name: str) -> FanInBatcher:
        """Lets nobody in to that one any more; who is, is on its list. It is the caller's to close."""
        with self._joining:
            return self._models.pop(name)

    def check(self) -> None:
        """Raises Unavailable if its thread has ended before it was closed, so that no ingress gets in any more."""
        if not self._ended and not self._thread.is_alive():
            raise Unavailable("acceptor: got the end of its thread, expected it to run until it is closed")

    def _work(self) -> None:
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._signal, selectors.EVENT_READ)
            while self._serve(selector):
                pass

    def _serve(self, selector: selectors.BaseSelector) -> bool:
        """Whatever comes next; False once it was the end. A method, so that no variable holds who has left."""
        for key, _ in selector.select():
            if key.fileobj is self._listener:
                self._let_in(selector)
            elif key.data is not None:
                self._forget(selector, key)
            else:
                os.eventfd_read(self._signal)
                if not self._shut.is_set():  # the name is free for the engine that comes next
                    selector.unregister(self._listener)
                    self._listener.close()
                    self._shut.set()
                if self._ended:
                    for other in [k for k in selector.get_map().values() if k.data is not None]:
                        self._forget(selector, other)
                    return False
        return True

    def _let_in(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("an ingress could not come in: %s", error)
            time.sleep(_FULL_S)
            return
        sock.settimeout(handshake.PATIENCE_S)
        fds: list[int] = []
        try:
            handshake.check_user(sock)
            hello, fds = handshake.receive(sock, Hello, 3)
            with self._joining:
                batcher = self._batcher(sock, hello)
                memory_fd, rings_fd, wake_fd = fds
                peer = Peer(sock, memory_fd, rings_fd, wake_fd, hello.memory_bytes)
                handshake.send(sock, batcher.welcome, (batcher.board_fd, batcher.dispatcher.wake_fd))
                batcher.join(peer)
        except Exception as error:  # whatever this one says, the next one is let in
            if not isinstance(error, _Refused):  # that one knows why, and its log says so: it asks again and again
                log.warning("an ingress was not let in: %s", error)
            sock.close()
            for fd in fds:
                os.close(fd)
        else:
            selector.register(sock, selectors.EVENT_READ, (batcher, peer))

    def _batcher(self, sock: socket.socket, hello: Hello) -> FanInBatcher:
        """That of the model that an ingress asks for. Raises _Refused, and tells it why, if there is none."""
        batcher = self._models.get(hello.model)
        if batcher is None:
            raise _refusal(sock, f"model: got {hello.model!r}, expected one of {sorted(self._models)}")
        if hello.fingerprint != batcher.fingerprint:
            what = f"bundle: got fingerprint {hello.fingerprint[:16]}, expected {batcher.fingerprint[:16]}"
            raise _refusal(sock, what)
        if hello.layout != batcher.layout.header:
            raise _refusal(
                sock, f"row blocks: got layout {hello.layout}, expected {batcher.layout.header}, of one release for both"
            )
        return batcher

    def _forget(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        """The only thing that an ingress says after its hello is that it is gone."""
        batcher, peer = key.data
        selector.unregister(peer.sock)
        batcher.leave(peer)
        peer.sock.close()


def _refusal(sock: socket.socket, why: str) -> _Refused:
    handshake.send(sock, Welcome(refused=why), ())
    return _Refused(why)
