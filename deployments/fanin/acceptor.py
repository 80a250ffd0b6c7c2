"""Lets ingresses in to an engine process and notices when they go: one thread that is idle but for that."""

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping

from deployments.fanin import handshake
from deployments.fanin.batcher import FanInEngine, Peer
from deployments.fanin.handshake import Hello, Welcome
from dpiframe_core.errors import Unavailable

log = logging.getLogger(__name__)

_FULL_S = 0.1  # until the next try to let somebody in, when this process had no descriptor left


class Doorkeeper:
    """Listens in `place` for ingresses of `models`."""

    def __init__(self, place: str, models: Mapping[str, FanInEngine]) -> None:
        self._models = models
        self._listener = handshake.listen(place)
        self._signal = os.eventfd(0, os.EFD_CLOEXEC)
        self._shut, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="door", daemon=True)
        self._thread.start()

    def close(self, drain_s: float) -> None:
        """Lets nobody in any more, and closes the engines as `FanInEngine.close` says; those who stayed learn it at the end."""
        os.eventfd_write(self._signal, 1)
        while not self._shut.wait(0.1) and self._thread.is_alive():
            pass
        # Only now do the engines ask ingresses to leave: those look for another engine, and would find this one again.
        closing = [threading.Thread(target=engine.close, args=(drain_s,)) for engine in self._models.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._ended = True
        os.eventfd_write(self._signal, 1)
        self._thread.join()
        os.close(self._signal)

    def check(self) -> None:
        """Raises Unavailable if its thread has ended before it was closed, so that no ingress gets in any more."""
        if not self._ended and not self._thread.is_alive():
            raise Unavailable("door: got the end of its thread, expected it to run until it is closed")

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
                self._greet(selector)
            elif key.data is not None:
                self._bid_farewell(selector, key)
            else:
                os.eventfd_read(self._signal)
                if not self._shut.is_set():  # the name is free for the engine that comes next
                    selector.unregister(self._listener)
                    self._listener.close()
                    self._shut.set()
                if self._ended:
                    for other in [k for k in selector.get_map().values() if k.data is not None]:
                        self._bid_farewell(selector, other)
                    return False
        return True

    def _greet(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("an ingress could not come in: %s", error)
            time.sleep(_FULL_S)
            return
        connection.settimeout(handshake.PATIENCE_S)
        fds: list[int] = []
        try:
            handshake.check_user(connection)
            hello, fds = handshake.receive(connection, Hello, 3)
            engine = self._models.get(hello.model)
            if engine is None:
                raise _refusal(connection, f"model: got {hello.model!r}, expected one of {sorted(self._models)}")
            if hello.fingerprint != engine.fingerprint:
                what = f"bundle: got fingerprint {hello.fingerprint[:16]}, expected {engine.fingerprint[:16]}"
                raise _refusal(connection, what)
            slab_fd, channel_fd, wake_fd = fds
            peer = Peer(connection, slab_fd, channel_fd, wake_fd, hello.slab_bytes)
            handshake.send(connection, engine.welcome, (engine.board_fd, engine.lanes.wake_fd))
        except Exception as error:  # whatever this one says, the next one finds the door open
            log.warning("an ingress was not let in: %s", error)
            connection.close()
            for fd in fds:
                os.close(fd)
        else:
            engine.join(peer)
            selector.register(connection, selectors.EVENT_READ, (engine, peer))

    def _bid_farewell(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        """The only thing that an ingress says after its hello is that it is gone."""
        engine, peer = key.data
        selector.unregister(peer.connection)
        engine.leave(peer)
        peer.connection.close()


def _refusal(connection: socket.socket, why: str) -> Unavailable:
    handshake.send(connection, Welcome(refused=why), ())
    return Unavailable(why)
