"""The few errors DPIFrame raises, each bound to one HTTP status. Every message reads `<where>: got <value>, expected <rule>`.

body -> parse/validate -> encode      -> queue              -> device
        InputError(422)   InputError     Overloaded(429)       Unavailable(503)
        TooLarge(413)                    DeadlineExceeded(504)
"""

from collections.abc import Iterable
from typing import ClassVar, Self, TypeVar

_Kind = TypeVar("_Kind", bound="InputError")
_SHOWN = 120  # characters of a bad value that a message repeats
_LISTED = 8


def shown(value: object) -> str:
    """`repr(value)`, cut to a length that fits a log line and never echoes a whole body."""
    try:
        text = repr(value)
    except ValueError:  # CPython refuses to spell out integers above some 4,300 digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


class DPIFrameError(Exception):
    """Root of all errors raised on purpose. `status` is the HTTP status, `code` a stable machine-readable name."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"


class InputError(DPIFrameError):
    """A request (or a call of the Python API) holds a value that breaks a rule; nothing was queued or scored."""

    status = 422
    code = "invalid_input"

    def __init__(self, where: str, got: object, expected: str) -> None:
        self._say(where, "null" if got is None else shown(got), expected)

    def _say(self, where: str, got: str, expected: str) -> None:
        self.where, self.got, self.expected = where, got, expected
        super().__init__(f"{where}: got {got}, expected {expected}")

    @classmethod
    def worded(cls, where: str, got: str, expected: str) -> Self:
        """Of a value that is put into words already."""
        return _input_error(cls, where, got, expected)

    def at(self, where: str) -> Self:
        """The same fault, told by another name of its place."""
        return _input_error(type(self), where, self.got, self.expected)

    def __reduce__(self) -> tuple[object, ...]:  # it may be raised in another process
        return _input_error, (type(self), self.where, self.got, self.expected)


def _input_error(kind: type[_Kind], where: str, got: str, expected: str) -> _Kind:
    error = kind.__new__(kind)
    error._say(where, got, expected)
    return error


class TooLarge(InputError):
    """A body or a request exceeds a size bound of the deployment."""

    status = 413
    code = "too_large"


class ModelNotFound(InputError):
    """The request names a model or version that this server does not host."""

    status = 404
    code = "model_not_found"


class Overloaded(DPIFrameError):
    """A bound on what may wait is met; the request was refused at once and may be sent again after `retry_after_s`."""

    status = 429
    code = "overloaded"

    def __init__(self, fault: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{fault}; retry after {retry_after_s:.3f} s")


class DeadlineExceeded(DPIFrameError):
    """The request's deadline passed before its scores were ready; it was not sent to the device after that moment."""

    status = 504
    code = "deadline_exceeded"


class Unavailable(DPIFrameError):
    """The engine is closed, not warmed up, or its device failed; another replica may answer."""

    status = 503
    code = "unavailable"


class BundleError(DPIFrameError):
    """A model bundle is missing, damaged or inconsistent. Raised at load, before anything is served."""

    code = "bad_bundle"


class ConfigError(DPIFrameError):
    """A deployment configuration breaks its schema."""

    code = "bad_config"
