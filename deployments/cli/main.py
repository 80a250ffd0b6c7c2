"""The `dpiframe` command. Parses arguments, prints results and one-line errors; imports what does the work when needed."""

import atexit
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deployments.cli.capacity_command import capacity
from deployments.cli.check_command import check_config
from deployments.cli.import_command import import_app
from deployments.cli.models_command import models_app
from deployments.cli.score_command import score
from deployments.cli.table_commands import compress, plan
from deployments.cli.terminal import BundlePath, Device, Precision, Progress, err, one_line_errors, service_errors, stdout
from deployments.cli.token_command import token
from deployments.processes import gc_seldom
from deployments.signals import interrupts_deferred, terminated

if TYPE_CHECKING:
    from deployments.config import DeploymentConfig
    from deployments.serve.launcher import Endpoint

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(import_app, name="import")
app.add_typer(models_app, name="models")

_LOOK_S = 1.0  # whether the cluster is still there
_DEMO_BUNDLE = Path("models/demo")

Host = Annotated[Literal["127.0.0.1", "0.0.0.0"] | None, typer.Option(help="0.0.0.0 lets other hosts connect.")]
Tokens = Annotated[Path | None, typer.Option(help="Who may ask: a file with lines of `dpiframe token`.")]
Open = Annotated[bool, typer.Option("--open", help="Anybody who reaches the port may ask.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535)]


def command() -> None:
    """The program `dpiframe`. Where it has imported Ray, Python's end is the process's: Ray's threads outlive it, and in the
    end of C++ one that meets what is gone crashes the process.
    """
    gc_seldom()
    ended: list[int] = []
    atexit.register(lambda: _end_process(ended))  # the first to be registered is the last to be called
    try:
        app()
    except SystemExit as end:
        if isinstance(end.code, int):
            ended.append(end.code)
        raise


def _end_process(status: list[int]) -> None:
    if status and "ray" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])


def _say_versions(asked: bool) -> None:
    if asked:
        said = [f"{name} {metadata.version(name)}" for name in ("dpiframe", "torch", "ray")]
        stdout.print(*said, f"Python {platform.python_version()}", sep=", ", markup=False, highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_versions, help="Print what a report of a fault needs.")
    ] = False,
) -> None:
    """CTR-model inference server."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="A deployment's YAML file.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Or one model bundle, with default settings.")] = None,
    host: Host = None,
    port: Port = None,
    tokens: Tokens = None,
    open_: Open = False,
    device: Device = None,
    precision: Precision = None,
    address: Annotated[str | None, typer.Option(help="An existing Ray cluster, started with both serving flags.")] = None,
) -> None:
    """Serve models over HTTP until SIGTERM (exit status 0) or Ctrl-C (130)."""
    if (config is None) == (bundle is None):
        raise typer.BadParameter("expected either --config or --bundle")
    with service_errors(), Progress() as progress:
        with interrupts_deferred():
            import deployments.worker_start  # noqa: F401
            from deployments.serve.launcher import running
        told = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: told.set())  # from now on, as its default would end a start
        settings = partial(_settings, config, bundle, host, port, device, precision, tokens, open_)
        with running(settings(), progress.step, address=address) as endpoint:
            progress.finish()
            _announce(endpoint)
            _wait_for_interrupt(endpoint, told, settings)


@app.command()
def demo(
    stay: Annotated[bool, typer.Option("--stay", help="Keep serving until Ctrl-C.")] = False,
    port: Port = None,
    device: Device = None,
    precision: Precision = None,
) -> None:
    """Build the demo model if it is absent, serve it, and score its example over HTTP."""
    with service_errors(), Progress() as progress:
        if not (_DEMO_BUNDLE / "model.yaml").exists():
            from deployments.demo.export import build_demo_bundle

            build_demo_bundle(_DEMO_BUNDLE)
        with interrupts_deferred():
            import deployments.worker_start  # noqa: F401
            from deployments.cli.demo_command import show_example
            from deployments.serve.host import free_port_from
            from deployments.serve.launcher import running
        config = _settings(None, _DEMO_BUNDLE, None, port or free_port_from(8000), device, precision)
        with running(config, progress.step) as endpoint:
            progress.finish()
            show_example(endpoint.url, endpoint.config.device, _DEMO_BUNDLE, stdout)
            if stay:
                _announce(endpoint)
                _wait_for_interrupt(endpoint)


@app.command()
def inspect(
    bundle: BundlePath,
    plot: Annotated[Path | None, typer.Option(help="Also draw the plan into this PNG, SVG or PDF file.")] = None,
) -> None:
    """Print a bundle's features, tables, graph, and its plan level by level."""
    with one_line_errors():
        from dpiframe_core.bundle.bundle import read_bundle
        from dpiframe_core.describe.inspect import describe

        if plot is not None:
            from deployments.offline.output_file import check_outfile

            check_outfile("--plot", plot, ".png", ".svg", ".pdf")
        read = read_bundle(bundle)
        stdout.print(describe(read), markup=False, soft_wrap=True)
        if plot is not None:
            from dpiframe_core.describe.plan_plot import plot_plan

            plot_plan(read, plot)
            err.print(f"drawn: {plot}")


@app.command()
def profile(
    bundle: BundlePath,
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Rows of the request.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The JSON file to write.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the timeline into this PNG, SVG or PDF file.")] = None,
    device: Device = None,
    precision: Precision = None,
) -> None:
    """Trace one request through the engine, for ui.perfetto.dev: kernels by stream and operator, and the host's part."""
    with one_line_errors():
        from deployments.cli.profile_command import write_profile

        stdout.print(write_profile(bundle, batch, out, plot, device or "auto", precision), markup=False, soft_wrap=True)


@app.command()
def tune(
    bundle: BundlePath,
    histogram: Annotated[list[Path], typer.Option(help="An answer of GET /v1/batch-sizes; once for each replica asked.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write all figures into this JSON file.")] = None,
    buckets: Annotated[int | None, typer.Option(min=1, max=1000, help="At most so many; as many as by default.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Weigh buckets by their time on the GPU, not by rows.")] = False,
    device: Device = None,
    precision: Precision = None,
) -> None:
    """Find the batch sizes to capture from those that the service met; prints the lines for its configuration."""
    if not measure and (device or precision):
        raise typer.BadParameter("--device and --precision say where to --measure, which was not asked for")
    with one_line_errors():
        from deployments.cli.tune_command import write_tuning

        tuning = write_tuning(bundle, histogram, out, buckets, (device or "auto", precision) if measure else None)
        err.print(tuning.report(), markup=False, soft_wrap=True)
        stdout.print(tuning.yaml(), markup=False, soft_wrap=True)


app.command()(compress)
app.command()(plan)


app.command()(check_config)
app.command()(score)
app.command()(capacity)
app.command()(token)


def _settings(
    file: Path | None,
    bundle: Path | None,
    host: str | None,
    port: int | None,
    device: str | None,
    precision: str | None,
    tokens: Path | None = None,
    open_: bool = False,
) -> "DeploymentConfig":
    """The file's settings, or the defaults for one bundle, with what the command line says over them."""
    from deployments.config import parse_config, read_config

    data: dict[str, Any] = {"models": [{"path": str(bundle)}]}
    if file is not None:
        data = read_config(file).model_dump(mode="json", exclude_unset=True)
    data["http"] = data.get("http", {}) | {k: v for k, v in (("host", host), ("port", port)) if v is not None}
    data |= {k: v for k, v in (("device", device), ("precision", precision)) if v is not None}
    if tokens is not None or open_:
        data["access"] = {"tokens": None if tokens is None else str(tokens), "open": open_}
    return parse_config(data, str(file or "command line"))


def _announce(endpoint: "Endpoint") -> None:
    stdout.print(f"Serving at {endpoint.url}/ (status page; API: {endpoint.url}/docs). Ctrl-C stops.", soft_wrap=True)
    http = endpoint.config.http
    if http.direct_port is not None:
        stdout.print(f"Direct port at {http.host}:{http.direct_port}")
    if http.direct_socket is not None:
        stdout.print(f"Unix socket at {http.direct_socket}", markup=False, soft_wrap=True)
    if http.tls is not None:
        stdout.print(f"TLS at {http.tls.host}:{http.tls.port}")
    if endpoint.config.grpc is not None:
        stdout.print(f"gRPC at {http.host}:{endpoint.config.grpc.port}")
    if endpoint.metrics_url:
        stdout.print(f"Prometheus metrics at {endpoint.metrics_url}")


def _wait_for_interrupt(
    endpoint: "Endpoint", told: threading.Event | None = None, settings: "Callable[[], DeploymentConfig] | None" = None
) -> None:
    """Whenever `told`, the models of the settings are read anew.

    Raises:
        KeyboardInterrupt: for Ctrl-C and SIGTERM. LaunchError: see `Endpoint`.
    """
    told = told or threading.Event()
    while True:
        if terminated():  # and something that catches every error went on
            raise KeyboardInterrupt
        endpoint.check()
        if told.wait(_LOOK_S) and settings is not None:
            told.clear()
            _reload(settings)


def _reload(settings: "Callable[[], DeploymentConfig]") -> None:
    from deployments.serve.launcher import reload
    from dpiframe_core.errors import DPIFrameError

    try:
        reload(settings())
    except DPIFrameError as error:
        err.print(f"error: {error}; the models stay as they are", markup=False, soft_wrap=True)
    else:
        stdout.print("The models are those of the configuration.")
