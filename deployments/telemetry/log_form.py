"""The log of a replica's process: a line, or a JSON object, for each record, on the process' own stderr. Knows no Ray.

Serve puts something of its own in the place of `sys.stderr`, which hands lines to Serve's logger as if they were of level INFO:
below its level they are lost. Hence `sys.__stderr__`, which Ray has made the file `worker-*.err`.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Literal

_OURS = ("deployments", "dpiframe_core")
_NAME = "dpiframe"  # tells our handler from one that somebody else puts there


class _Form(logging.Formatter):
    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback; logging's own goes by `print`, in whose place Serve puts something else."""
        return "".join(traceback.format_exception(*ei)).rstrip("\n")


class TextForm(_Form):
    """A record as a line, and what follows its first line, such as a traceback, each line after a bar: text of a client in an
    exception's message cannot look like a record, nor reach a terminal as its commands: control characters are escaped.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return "\n  | ".join(map(_escaped, super().format(record).split("\n")))


class JsonForm(_Form):
    """A record as one line of ASCII: whatever a client sends, no part of it can begin another line or steer a terminal.

    Keys: time (UTC, RFC 3339), level, logger, message; request_id if the record has one; error, the traceback if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            line["request_id"] = str(request_id)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str, form: Literal["text", "json"]) -> None:
    """Has this process log: our own records from `level` on, those of libraries from warnings on. The last call counts."""
    root = logging.getLogger()
    for earlier in [h for h in root.handlers if h.name == _NAME]:
        root.removeHandler(earlier)
    handler = logging.StreamHandler(sys.__stderr__)
    handler.set_name(_NAME)
    handler.setFormatter(JsonForm() if form == "json" else TextForm())
    root.addHandler(handler)
    for package in _OURS:
        logging.getLogger(package).setLevel(level.upper())


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
