"""What watches single requests in a replica: nothing unless it is asked for."""

import threading
from pathlib import Path

import pytest

from deployments.config import parse_config
from deployments.scoring.watchers import Watchers
from deployments.serve.observers import Observers
from dpiframe_core.errors import ConfigError


def no(model: str, version: str, requests: int) -> None:
    raise AssertionError(f"lost {requests} of {model} {version}")


MODEL = {"models": [{"path": "m"}]}


def test_without_configuration_there_are_no_watchers_and_no_threads() -> None:
    before = {*threading.enumerate()}  # of which some may just end
    observers = Observers.of(parse_config(MODEL, "test"), no)
    assert observers.watchers == Watchers(None, None)
    assert {*threading.enumerate()} <= before
    observers.close()


def test_with_both_there_are_two_watchers_and_their_end_ends_their_threads(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    wanted = {"tracing": {"endpoint": "http://127.0.0.1:1/v1/traces"}, "score_log": {"folder": str(tmp_path / "log")}}
    observers = Observers.of(parse_config(MODEL | wanted, "test"), no)
    assert observers.watchers.tracer is not None
    assert observers.watchers.recorder is not None
    assert {*threading.enumerate()} - before
    observers.close()
    assert {*threading.enumerate()} <= before


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = parse_config(MODEL | {"score_log": {"folder": str(tmp_path / "file" / "log")}}, "test")
    with pytest.raises(ConfigError, match=r"score_log.folder: got 'Not a directory', expected a folder that can be made"):
        Observers.of(config, no)


def test_a_relative_folder_starts_where_the_command_does() -> None:
    config = parse_config(MODEL | {"score_log": {"folder": "log"}, "profiles": "profiles"}, "test").with_absolute_paths()
    assert config.score_log is not None
    assert (config.score_log.folder, config.profiles) == (str(Path("log").absolute()), str(Path("profiles").absolute()))
