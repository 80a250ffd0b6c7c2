"""The tokens of a service, as their file lists them: names, scopes and hashes, never a token itself.

No message of this module shows a value of the file: somebody may have written a token where its hash belongs.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dpiframe_core.errors import ConfigError, InputError
from dpiframe_core.strict import Name, Strict
from dpiframe_core.strict_yaml import load_yaml

Scope = Literal["score", "admin", "metrics"]

_PREFIX = "dpi_"  # by which scanners of source code find one that was left there
_MOST_BYTES = 1 << 20
_RULE = "a list of {name: NAME, scopes: [score], sha256: HASH}"
_HEAD = 8


class Token(Strict):
    """A line of the file. `sha256` is that of the token's ASCII bytes, in lower-case hexadecimal digits."""

    name: Name
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    def line(self) -> str:
        """As it stands in the file."""
        return f"- {{name: {json.dumps(self.name)}, scopes: [{', '.join(self.scopes)}], sha256: {self.sha256}}}"


@dataclass(frozen=True, slots=True)
class Known:
    """What is kept of a token: its SHA-256 and what it may do."""

    digest: bytes
    scopes: frozenset[str]


def new_token(name: str, scopes: Sequence[str]) -> tuple[str, Token]:
    """A random token of 256 bits, and its line for the file.

    Raises:
        InputError: the name or a scope is none.
    """
    secret = _PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    try:
        return secret, Token(name=name, scopes=tuple(dict.fromkeys(scopes)), sha256=digest)
    except InputError as error:
        raise error.at("scope" if "scopes" in error.where else "name") from None


def head_of(digest: bytes) -> bytes:
    """What a token is looked up by, before its whole hash is compared."""
    return digest[:_HEAD]


def read_tokens(path: str | Path) -> dict[bytes, Known]:
    """The tokens of a file, by the heads of their hashes.

    Raises:
        ConfigError: it cannot be read, has another form, or one token twice.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: got {error.strerror!r}, expected a readable file of tokens") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: got more than {_MOST_BYTES} bytes, expected {_RULE}")
    try:
        listed = TypeAdapter(tuple[Token, ...]).validate_json(json.dumps(load_yaml(data), default=str), strict=True)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
        raise ConfigError(f"{path}: {where + ': ' * bool(where)}got something else, expected {_RULE}") from None
    except ValueError:
        raise ConfigError(f"{path}: got no plain YAML, expected {_RULE}") from None
    known = {head_of(d): Known(d, frozenset(t.scopes)) for t in listed if (d := bytes.fromhex(t.sha256))}
    if not known or len(known) < len(listed):
        raise ConfigError(f"{path}: got {'one token twice' if known else 'no token'}, expected {_RULE}")
    return known
