"""How a command that serves ends: 0 on SIGTERM, 130 on Ctrl-C, in whatever the signal meets."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator

import pytest
import typer
from ray._private import utils

from deployments import signals
from deployments.cli.main import _wait_for_interrupt
from deployments.cli.terminal import service_errors
from deployments.config import parse_config
from deployments.private_ray import undisturbed_init
from deployments.serve.launcher import Endpoint
from deployments.signals import interrupts_deferred


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    before, hook = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}, sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_signal_says_the_status_and_one_that_follows_changes_nothing(signum: signal.Signals, status: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(typer.Exit) as ended, service_errors():
        os.kill(os.getpid(), signum)
    assert ended.value.exit_code == status
    for again in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), again)


def test_an_interrupt_that_ray_raises_in_the_place_of_ours_is_still_a_sigterm() -> None:
    def raised_anew() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(typer.Exit) as ended, service_errors():
        raised_anew()
    assert ended.value.exit_code == 0


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_during_imports_ends_the_command_after_them(signum: signal.Signals, status: int) -> None:
    """pydantic, which builds a class, makes a SchemaError of an interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    imported: list[int] = []
    with pytest.raises(typer.Exit) as ended, service_errors():
        _imports(signum, imported)
    assert (ended.value.exit_code, imported) == (status, [1])


def _imports(signum: signal.Signals, imported: list[int]) -> None:
    with interrupts_deferred():
        os.kill(os.getpid(), signum)
        imported.append(1)
    imported.append(2)


def test_an_interrupt_waits_for_a_block_that_hangs_no_longer_than_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_PATIENCE_S", 0.05)
    with pytest.raises(typer.Exit) as ended, service_errors():
        _hangs_after(signal.SIGTERM)
    assert ended.value.exit_code == 0


def test_a_second_interrupt_does_not_wait() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(typer.Exit) as ended, service_errors():
        _hangs_after(signal.SIGINT, signal.SIGINT)
    assert ended.value.exit_code == 130


def _hangs_after(*signums: signal.Signals) -> None:
    with interrupts_deferred():
        for signum in signums:
            os.kill(os.getpid(), signum)
        time.sleep(10)
        pytest.fail("it waited")


def _meets_a_weak_references_callback(signum: signal.Signals) -> None:
    """What the callback raises, Python prints and forgets."""

    def callback(_: object) -> None:
        os.kill(os.getpid(), signum)
        time.sleep(0)

    kept = {1}
    reference = weakref.ref(kept, callback)
    del kept
    assert reference() is None
    time.sleep(10)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_though_its_interrupt_meets_what_hides_it(signum: signal.Signals, status: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(typer.Exit) as ended, service_errors():
        _meets_a_weak_references_callback(signum)
    assert ended.value.exit_code == status


def _swallows_a_sigterm_and_serves() -> None:
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), signal.SIGTERM)
    config = parse_config({"models": [{"path": "models/ctr"}]}, "it")
    endpoint = Endpoint("", "", config, lambda: pytest.fail("it serves on"))
    _wait_for_interrupt(endpoint)


def test_a_sigterm_that_something_swallowed_ends_the_service_once_it_serves() -> None:
    with pytest.raises(typer.Exit) as ended, service_errors():
        _swallows_a_sigterm_and_serves()
    assert ended.value.exit_code == 0


def test_rays_alarm_which_would_abort_the_process_is_off() -> None:
    """Of the handler of crashes, absl's, that its C++ part has while it starts."""
    with pytest.raises(typer.Exit) as ended, service_errors():
        _sent_with_an_alarm()
    assert (ended.value.exit_code, signal.alarm(0)) == (0, 0)


def _sent_with_an_alarm() -> None:
    with interrupts_deferred():
        signal.alarm(60)
        os.kill(os.getpid(), signal.SIGTERM)


def test_rays_own_handlers_which_would_end_the_process_with_another_status_are_not_set() -> None:
    passed: list[int] = []
    with pytest.raises(typer.Exit) as ended, service_errors():
        _starts_ray(passed)
    assert (ended.value.exit_code, passed) == (0, [1])


def _starts_ray(passed: list[int]) -> None:
    with undisturbed_init():
        utils.set_sigterm_handler(lambda *_: pytest.fail("Ray's"))
        os.kill(os.getpid(), signal.SIGTERM)
        passed.append(1)
    passed.append(2)


ENDING = """
import atexit, ctypes, sys, types
from deployments.cli import main

if "ray" in sys.argv:
    sys.modules["ray"] = types.ModuleType("ray")
@main.app.command()
def quick():
    atexit.register(print, "its functions")  # as Ray has some
    sys.exit(3)

library = ctypes.CDLL(None)
library.__cxa_atexit(library.abort, None, None)
sys.argv = ["dpiframe", "quick"]
main.command()
"""


@pytest.mark.parametrize(("imported", "status"), [("ray", 3), ("nothing", -signal.SIGABRT)])
def test_where_ray_is_the_end_of_python_is_that_of_the_process(imported: str, status: int) -> None:
    """At the end of C++ threads of Ray still run, and one crashed the process in a start that met SIGTERM."""
    done = subprocess.run([sys.executable, "-c", ENDING, imported], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("its functions\n", status), done.stderr
