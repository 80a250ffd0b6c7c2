"""The log as JSON: one object a line whatever is in it, and where the lines go."""

import json
import logging
import subprocess
import sys

import pytest

from deployments.telemetry.log_form import JsonForm

HOSTILE = 'a"b\\c\nERROR forged: line\r\x1b[31mred\x00\u2028\u202e\ud800é'


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("deployments.x", logging.WARNING, "x.py", 1, message, args, None)
    made.created = 1_800_000_000.0625
    made.__dict__.update(extra)
    return made


def test_a_record_is_one_object_with_time_level_logger_message_and_the_request_id_where_one_is_known() -> None:
    told = {"time": "2027-01-15T08:00:00.062Z", "level": "warning", "logger": "deployments.x", "message": "3 rows failed"}
    assert json.loads(JsonForm().format(record("%d rows failed", 3))) == told
    assert json.loads(JsonForm().format(record("%d rows failed", 3, request_id="abc"))) == {**told, "request_id": "abc"}


def test_hostile_characters_stay_inside_their_string_and_come_back_whole() -> None:
    line = JsonForm().format(record("got %s", HOSTILE, request_id=HOSTILE))
    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line)
    assert (told["message"], told["request_id"]) == (f"got {HOSTILE}", HOSTILE)


def test_a_traceback_is_in_the_object_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)  # Serve puts something of its own there
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        failed = record("failed")
        failed.exc_info = (ValueError, error, error.__traceback__)
    line = JsonForm().format(failed)
    assert line.isprintable()
    assert HOSTILE.encode("unicode_escape") in json.loads(line)["error"].encode("unicode_escape")


PROGRAM = """
import io, logging, sys
from deployments.telemetry.log_form import log_to_stderr
sys.stderr = io.StringIO()  # as Serve does
log_to_stderr("error", "text")
log_to_stderr("info", sys.argv[1])
logging.getLogger("deployments.x").info("loaded\\n%d", 5)
logging.getLogger("dpiframe_core.y").debug("not told")
logging.getLogger("library").info("not told")
logging.getLogger("library").warning("odd")
sys.__stderr__.write(sys.stderr.getvalue())
"""


def said(form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, timeout=60, check=True)
    return done.stderr.splitlines()


def test_our_records_from_the_level_on_and_warnings_of_libraries_go_to_the_stderr_that_the_process_was_born_with() -> None:
    lines = [json.loads(line) for line in said("json")]
    assert [(line["logger"], line["level"], line["message"]) for line in lines] == [
        ("deployments.x", "info", "loaded\n5"),
        ("library", "warning", "odd"),
    ]
    ours, rest, library = said("text")
    assert ours.endswith(" INFO deployments.x: loaded")
    assert rest == "  | 5"
    assert library.endswith(" WARNING library: odd")
