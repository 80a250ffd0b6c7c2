"""Whether a request may pass: its bearer token against the tokens of a file, which is read anew when it changes.

A check costs a hash of the token and a look-up, whatever the number of tokens; nothing of a request is kept.
"""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Self

from deployments.access.tokens import Known, Scope, head_of, read_tokens
from deployments.config_clients import Access
from dpiframe_core.errors import ConfigError, DPIFrameError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_LONGEST = 512  # bytes of a token; a longer one is not worth a hash
_NOBODY = Known(bytes(32), frozenset())


class Unauthenticated(DPIFrameError):
    """The request brings no token, or none that is known here."""

    status = 401
    code = "unauthenticated"


class Forbidden(DPIFrameError):
    """Its token is known, and lacks the scope for what was asked."""

    status = 403
    code = "forbidden"


class Gate:
    """The tokens of one file. Threads may share it: at worst two of them read a new file.

    A file that is broken or gone leaves the tokens as they were; the log says so, once for each change.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for a file that will not do."""
        self._path, self._clock = path, clock
        self._look_at = clock() + _LOOK_EVERY_S
        self._stamp = _stamp(path)  # before it is read: a change in between is then seen
        self._known, self._changes = read_tokens(path), 0

    @classmethod
    def of(cls, access: Access | None) -> Self | None:
        """That of a configuration; None if anybody may ask."""
        return None if access is None or access.tokens is None else cls(access.tokens)

    def require(self, headers: Iterable[tuple[bytes, bytes]], scope: Scope | None = None) -> None:
        """Passes a request with a token of that scope, or with any token. Names of headers are in lower case.

        Raises:
            Unauthenticated, Forbidden
        """
        self._read_anew()
        given = [value for name, value in headers if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if kind.lower() != b"bearer" or not token:
            got = f"{len(given)} Authorization headers" if len(given) > 1 else "no bearer token"
            raise Unauthenticated(f"authorization: got {got}, expected one bearer token")
        # By the head of its hash, which nobody can choose; then the whole in constant time.
        digest = hashlib.sha256(token.strip(b" ") if len(token) <= _LONGEST else b"").digest()
        known = self._known.get(head_of(digest), _NOBODY)
        if not hmac.compare_digest(digest, known.digest):
            raise Unauthenticated("authorization: got an unknown token, expected one of this service")
        if scope is not None and scope not in known.scopes:
            raise Forbidden(f"authorization: got a token without the scope {scope!r}, expected one with it")

    def changes(self) -> int:
        """How often the tokens have become others: for who remembers that a request may pass. Looks at the file, too."""
        self._read_anew()
        return self._changes

    def _read_anew(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._known, self._changes = read_tokens(self._path), self._changes + 1
        except ConfigError as error:
            log.error("the tokens stay as they were: %s", error)
        else:
            log.info("%d tokens read from %s", len(self._known), self._path)


def _stamp(path: str) -> tuple[int, ...] | None:
    """What changes when a file does, also by a link to another; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
