"""The stored profile of a model: the file that `dpiframe profile` wrote, read anew for each asker, so the last one is shown.

A replica does not profile itself: that takes an engine of its own beside the one that serves, and torch's profiler slows both.
"""

import json
from pathlib import Path

from dpiframe_core.errors import DPIFrameError

_MOST_BYTES = 16 * 2**20  # a request's timeline takes some 100 kB


class NoProfile(DPIFrameError):
    """There is none, or what is there is none."""

    status = 404
    code = "no_profile"


class Profiles:
    """Those of one folder: the profile of a model lies in `<name>.json`, by the name that it is served under."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def read(self, model: str) -> bytes:
        """The file's content, proven to be a trace. Blocks for as long as reading does. `model`: of a model served here.

        Raises:
            NoProfile
        """
        if self._folder is None:
            raise NoProfile("profiles: got no folder in the configuration, expected `profiles: FOLDER`")
        rule = f"{model}.json in the configured folder, as `dpiframe profile BUNDLE --batch ROWS -o FILE` writes it"
        try:
            with (self._folder / f"{model}.json").open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise NoProfile(f"profiles: got {error.strerror!r}, expected {rule}") from None
        if len(content) > _MOST_BYTES or not _is_trace(content):
            raise NoProfile(f"profiles: got a file of another kind, expected {rule}")
        return content


def _is_trace(content: bytes) -> bool:
    try:
        read = json.loads(content)
    except ValueError:
        return False
    return isinstance(read, dict) and isinstance(read.get("traceEvents"), list) and isinstance(read.get("otherData"), dict)
