"""The file that remembers what a service serves over a restart of all of it. Written whole, or not at all."""

import json
import os
from pathlib import Path

from pydantic import ValidationError

from deployments.lifecycle.desired import Desired
from dpiframe_core.errors import ConfigError, shown
from dpiframe_core.strict import Strict, first_fault


class Remembered(Strict):
    """`digest`: of the configuration's `models`, from which the state came. Of another one it holds no longer."""

    digest: str
    desired: Desired


class StateFile:
    """At `path`, or nowhere: then nothing is remembered."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)

    def read(self) -> Remembered | None:
        """None if there is none yet. Raises ConfigError if it is damaged."""
        if self._path is None or not self._path.exists():
            return None
        text = self._path.read_bytes()
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            got, without = shown(f"{len(text)} bytes that are no JSON ({error})"), "without it the configuration counts"
            raise ConfigError(f"{self._path}: got {got}, expected what a service left there; {without}") from None
        try:
            return Remembered.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"{self._path}: {first_fault(error)}; without it the configuration counts") from None

    def write(self, remembered: Remembered) -> None:
        """Raises OSError, and the file is as it was."""
        if self._path is None:
            return
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with beside.open("w") as file:
            file.write(remembered.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
