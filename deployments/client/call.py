"""One request of a client with all its tries: its body, what an answer to it means, and when to send it again.

Knows no I/O: both clients of `client` drive it.
"""

import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from deployments.client.columns import WireTensor
from deployments.client.scores import ENVELOPE_LENGTH, Scores, scores_of

_ALIGN = 16  # the envelope is padded with spaces, so that the server reads tensors where they lie


def bearer(token: str | None) -> dict[str, str]:
    """The header that brings a token, by default that of the environment variable DPIFRAME_TOKEN; none without either.

    Raises:
        ValueError: it cannot stand in a header. It is not shown.
    """
    token = os.environ.get("DPIFRAME_TOKEN", "") if token is None else token
    if not token:
        return {}
    if re.fullmatch("[!-~]{1,512}", token) is None:
        raise ValueError("token: got other characters or more, expected at most 512 visible ASCII characters")
    return {"Authorization": f"Bearer {token}"}


def segment(name: str) -> str:
    """A model's or version's name as a part of a path.

    Raises:
        ValueError: it is of dots alone, which HTTP clients resolve: `versions/..` would be the whole model.
    """
    if name in (".", ".."):
        raise ValueError(f"name: got {name!r}, expected that of a model or a version")
    return quote(name, "")


class ClientError(Exception):
    """The service did not give scores. `status` is that of HTTP, 0 if no answer came; `message` is the service's own."""

    def __init__(self, status: int, message: str, request_id: str = "") -> None:
        self.status = status
        self.message = message
        self.request_id = request_id
        super().__init__(f"{status or 'no answer'}: {message}")


@dataclass(frozen=True, slots=True)
class Retry:
    """When to send a request again: after 429, 503, a lost connection, or a 404 or 500 in which the service itself has no part.

    Attributes:
        times: beyond the first; scoring changes nothing, so that it may be asked for twice.
        first_wait_s: doubled each time, with up to as much again by chance. What the service asks for (`Retry-After-Ms`, or
            else `Retry-After`) goes before it, with up to a quarter more: those refused together must not return together.
        longest_wait_s: if the service asks for more, that ends in the error.
    """

    times: int = 3
    first_wait_s: float = 0.02
    longest_wait_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Before the next try."""

    seconds: float


@dataclass(slots=True)
class Call:
    """The state of its tries. `build` and send it, have the outcome `settled`; after a `Wait`, once more."""

    url: str
    tensors: list[WireTensor]
    parameters: Mapping[str, object]
    deadline_s: float | None
    timeout_s: float
    retry: Retry
    rows: int | None = None  # candidates, of which there will be a score each; None: not known
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    tries: int = 0

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not (isinstance(self.deadline_s, int | float) and math.isfinite(self.deadline_s)):
            raise ValueError(f"deadline_s: got {self.deadline_s!r}, expected a finite number")
        self.started = self.clock()

    def build(self) -> dict[str, Any]:
        """The arguments of a post; the service is told what is left of the deadline."""
        self.tries += 1
        left = self._left_s()
        parameters = {**self.parameters, "binary_data_output": True}
        if self.deadline_s is not None:
            if left <= 0:
                raise ClientError(504, f"deadline: got past {self.deadline_s:g} s, expected the scores before it")
            parameters["deadline_ms"] = left * 1e3
        inputs = [
            {"name": t.name, "datatype": t.datatype, "shape": t.shape, "parameters": {"binary_data_size": len(t.data)}}
            for t in self.tensors
        ]
        envelope = json.dumps({"parameters": parameters, "inputs": inputs}, separators=(",", ":")).encode()
        envelope = envelope.ljust(-(-len(envelope) // _ALIGN) * _ALIGN)
        headers = {"Content-Type": "application/octet-stream", ENVELOPE_LENGTH: str(len(envelope))}
        content = b"".join([envelope, *(t.data for t in self.tensors)])
        return {"url": self.url, "content": content, "headers": headers, "timeout": left}

    def settled(self, got: httpx.Response | httpx.TransportError) -> Scores | Wait:
        """The scores, or how long to wait before the next try.

        Raises:
            ClientError: another try would not help, or there is none left.
        """
        if isinstance(got, httpx.TransportError):
            if isinstance(got, httpx.TimeoutException) and not isinstance(got, httpx.ConnectTimeout):
                raise ClientError(504, f"{type(got).__name__} after {self.clock() - self.started:.3f} s") from got
            return self._wait(ClientError(0, f"{type(got).__name__}: {got}"), None)
        if got.status_code == 200:
            return self._scores(got)
        message = _message(got)
        request_id = got.headers.get("x-request-id", "")
        error = ClientError(got.status_code, got.text[:200] if message is None else message, request_id)
        if got.status_code in (429, 503) or (got.status_code in (404, 500) and message is None):
            return self._wait(error, _asked_s(got.headers))
        raise error

    def _scores(self, got: httpx.Response) -> Scores:
        try:
            return scores_of(got, self.rows)
        except (ValueError, KeyError, TypeError) as error:
            raise ClientError(200, f"got an answer that is no scores ({error}), expected one in binary form") from error

    def _wait(self, error: ClientError, asked_s: float | None) -> Wait:
        if asked_s is None:
            seconds = least = self.retry.first_wait_s * 2 ** (self.tries - 1) * (1 + random.random())
        else:
            seconds, least = asked_s * (1 + random.random() / 4), asked_s
        late = self.deadline_s is not None and seconds >= self._left_s()
        if self.tries > self.retry.times or least > self.retry.longest_wait_s or late:
            raise error
        return Wait(seconds)

    def _left_s(self) -> float:
        return self.timeout_s if self.deadline_s is None else self.started + self.deadline_s - self.clock()


def _asked_s(headers: httpx.Headers) -> float | None:
    for name, per_second in (("retry-after-ms", 1e3), ("retry-after", 1.0)):
        value = headers.get(name, "")
        if value.isascii() and value.isdigit():
            return float(value) / per_second
    return None


def _message(answer: httpx.Response) -> str | None:
    """The message of an error of the service's own, whose body has its form; None of anything else between it and us."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return error if isinstance(error, str) else error.get("message") if isinstance(error, dict) else None
