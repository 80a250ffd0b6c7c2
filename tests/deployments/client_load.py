"""Our client at work while something happens to the service: what it got, and what each of its tries met."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np

from deployments.client import Client


class Counting(httpx.HTTPTransport):
    """A connection for each request, and a count of what became of it: statuses and names of errors."""

    def __init__(self, met: Counter[str]) -> None:
        super().__init__(limits=httpx.Limits(max_keepalive_connections=0))
        self._met = met

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            answer = super().handle_request(request)
            answer.read()
        except httpx.TransportError as error:
            self._met[type(error).__name__] += 1
            raise
        self._met[str(answer.status_code)] += 1
        return answer


class ClientLoad:
    """`clients` threads that score the example again and again, within the `with`.

    Attributes:
        right, wrong: answers. failed: errors that were left after the client's own tries. met: outcomes of single tries.
    """

    def __init__(self, url: str, example: Mapping[str, Any], wanted: np.ndarray[Any, Any], clients: int = 4) -> None:
        self.clients = clients
        self.right, self.wrong, self.failed, self.met = 0, 0, Counter[str](), Counter[str]()
        self._url, self._example, self._wanted = url, example, wanted
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(clients)]

    @property
    def lost(self) -> int:
        """Tries that brought no scores."""
        return self.met.total() - self.met["200"]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.go_on(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(60)

    def go_on(self, answers: int = 50, within_s: float = 120) -> None:
        """Returns after so many more right answers."""
        before = self.right
        wait_until(lambda: self.right >= before + answers or bool(self.failed), within_s)

    def _work(self) -> None:
        with Client(self._url, "demo", transport=Counting(self.met)) as client:
            while not self._done.is_set():
                try:
                    scores = client.score(self._example["candidates"], self._example["context"])
                except Exception as error:
                    self.failed[repr(error)] += 1
                    self._done.wait(0.1)
                    continue
                if np.array_equal(scores[:, 0], self._wanted):
                    self.right += 1
                else:
                    self.wrong += 1
                self._done.wait(0.005)


def wait_until(true: Callable[[], bool], within_s: float = 120) -> float:
    """How long it took."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() < begun + within_s
        time.sleep(0.05)
    return time.monotonic() - begun
