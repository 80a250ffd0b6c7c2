"""How a command that serves ends: 0 on SIGTERM, 130 on Ctrl-C, in whatever the signal meets."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import typer

from deployments.cli.terminal import service_errors
from deployments.signals import interrupt_on_sigterm, ray_init


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
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


def _handled_and_sent(handler: Callable[..., None]) -> None:
    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_handler_of_rays_that_would_end_the_process_with_another_status_does_not() -> None:
    def rays(*_: object) -> None:
        raise SystemExit(1)

    interrupt_on_sigterm()
    with pytest.raises(KeyboardInterrupt), ray_init():
        _handled_and_sent(rays)
    with ray_init():
        signal.signal(signal.SIGTERM, rays)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
