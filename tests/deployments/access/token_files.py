"""Files of tokens for the tests, changed as an editor and Kubernetes change them: all at once."""

import os
from pathlib import Path
from typing import Any

from deployments.access.tokens import new_token


def written(path: Path, text: str) -> Path:
    """Puts a new file in the place of the old one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)
    return path


def made(path: Path, **scopes: list[Any]) -> dict[str, str]:
    """A file of one token a name; the tokens by name."""
    tokens = {name: new_token(name, of) for name, of in scopes.items()}
    written(path, "".join(f"{token.line()}\n" for _, token in tokens.values()))
    return {name: secret for name, (secret, _) in tokens.items()}


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
