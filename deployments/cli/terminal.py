"""What the commands share: the two consoles, one-line errors, and options that mean the same everywhere."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from deployments.signals import interrupt_on_sigterm, stay_uninterrupted, terminated

stdout, err = Console(highlight=False), Console(stderr=True, highlight=False)

Device = Annotated[Literal["auto", "cpu", "cuda"] | None, typer.Option()]
BundlePath = Annotated[Path, typer.Argument(help="A model bundle's directory.")]
Splitter = Annotated[
    list[str] | None, typer.Option(metavar="FEATURE=SEP", help="What joins a feature's values in CSV; once each.")
]
Precision = Annotated[Literal["fp32", "tf32", "bf16", "fp8"] | None, typer.Option(help="Of the dense layers.")]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the command with status 1 and one line on an error of ours, and with 130 on Ctrl-C."""
    from dpiframe_core.errors import DPIFrameError

    try:
        yield
    except DPIFrameError as error:
        message = "; ".join([str(error), *getattr(error, "__notes__", [])])
        err.print(f"error: {message}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextlib.contextmanager
def service_errors() -> Iterator[None]:
    """The same of a command that serves: SIGTERM, which is how it is asked to end, ends it with status 0 at any time."""
    interrupt_on_sigterm()
    with one_line_errors():
        try:
            yield
        except KeyboardInterrupt:
            if not terminated():
                raise
            raise typer.Exit(0) from None
        finally:
            stay_uninterrupted()


class Progress:
    """Steps on stderr with the seconds each took: a spinner on a terminal, else a line when a step begins."""

    def __enter__(self) -> "Progress":
        self._status: Any = None
        self._text = ""
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def step(self, text: str) -> None:
        self.finish()
        self._text, self._start = text, time.monotonic()
        if err.is_terminal:
            self._status = err.status(text)
            self._status.start()
        else:
            err.print(f"{text} ...", markup=False)

    def finish(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
            err.print(f"{self._text}: {time.monotonic() - self._start:.1f} s", markup=False)


def by_feature(splitter: list[str] | None) -> dict[str, str]:
    """The separators of `--splitter`, by feature; ends the command with status 2 if one is none."""
    separators = {}
    for text in splitter or ():
        name, equals, separator = text.partition("=")
        if not (name and equals and separator):
            raise typer.BadParameter(f"--splitter: got {text!r}, expected FEATURE=SEPARATOR")
        separators[name] = separator
    return separators
