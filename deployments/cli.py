"""The `dpiframe` command. Parses arguments, prints results and one-line errors; imports what does the work when needed."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

if TYPE_CHECKING:
    from deployments.config import DeploymentConfig
    from deployments.launcher import Endpoint

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="CTR-model inference server."
)
_out, _err = Console(highlight=False), Console(stderr=True, highlight=False)

_DEMO_BUNDLE = Path("models/demo")
_SHOWN_CANDIDATES = 8
_DEMO_REQUESTS = 50

Host = Annotated[Literal["127.0.0.1", "0.0.0.0"] | None, typer.Option(help="0.0.0.0 lets other hosts connect.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535)]
Device = Annotated[Literal["auto", "cpu", "cuda"] | None, typer.Option()]
Precision = Annotated[Literal["fp32", "tf32", "bf16"] | None, typer.Option(help="Of the dense layers.")]


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="A deployment's YAML file.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Or one model bundle, with default settings.")] = None,
    host: Host = None,
    port: Port = None,
    device: Device = None,
    precision: Precision = None,
    address: Annotated[str | None, typer.Option(help="An existing Ray cluster, started with both serving flags.")] = None,
) -> None:
    """Serve models over HTTP until Ctrl-C."""
    if (config is None) == (bundle is None):
        raise typer.BadParameter("expected either --config or --bundle")
    with _one_line_errors(), _Progress() as progress:
        from deployments.launcher import running

        with running(_settings(config, bundle, host, port, device, precision), progress.step, address=address) as endpoint:
            progress.finish()
            _announce(endpoint)
            _wait_for_interrupt()


@app.command()
def demo(
    stay: Annotated[bool, typer.Option("--stay", help="Keep serving until Ctrl-C.")] = False,
    port: Port = None,
    device: Device = None,
    precision: Precision = None,
) -> None:
    """Build the demo model if it is absent, serve it, and score its example over HTTP."""
    with _one_line_errors(), _Progress() as progress:
        if not (_DEMO_BUNDLE / "model.yaml").exists():
            from deployments.demo import build_demo_bundle

            build_demo_bundle(_DEMO_BUNDLE)
        from deployments.host import free_port_from
        from deployments.launcher import running

        config = _settings(None, _DEMO_BUNDLE, None, port or free_port_from(8000), device, precision)
        with running(config, progress.step) as endpoint:
            progress.finish()
            _show_example(endpoint)
            if stay:
                _announce(endpoint)
                _wait_for_interrupt()


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(help="A model bundle's directory.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the plan into this PNG file.")] = None,
) -> None:
    """Print a bundle's features, tables, graph, and its plan level by level."""
    with _one_line_errors():
        from dpiframe_core.bundle import read_bundle
        from dpiframe_core.inspect import describe

        read = read_bundle(bundle)
        _out.print(describe(read), markup=False, soft_wrap=True)
        if plot is not None:
            from dpiframe_core.plot import plot_plan

            plot_plan(read, plot)
            _err.print(f"drawn: {plot}")


@app.command()
def check_config(files: Annotated[list[Path], typer.Argument(help="Deployment YAML files.")]) -> None:
    """Check configuration files without starting anything."""
    from deployments.config import read_config
    from dpiframe_core.errors import ConfigError

    faults = 0
    for file in files:
        try:
            read_config(file)
            _out.print(f"{file}: ok")
        except ConfigError as error:
            faults += 1
            _err.print(str(error), markup=False, soft_wrap=True)
    if faults:
        raise typer.Exit(1)


class _Progress:
    """Steps on stderr with the seconds each took: a spinner on a terminal, else a line when a step begins."""

    def __enter__(self) -> "_Progress":
        self._status: Any = None
        self._text = ""
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def step(self, text: str) -> None:
        self.finish()
        self._text, self._start = text, time.monotonic()
        if _err.is_terminal:
            self._status = _err.status(text)
            self._status.start()
        else:
            _err.print(f"{text} ...", markup=False)

    def finish(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
            _err.print(f"{self._text}: {time.monotonic() - self._start:.1f} s", markup=False)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    from dpiframe_core.errors import DPIFrameError

    try:
        yield
    except DPIFrameError as error:
        message = "; ".join([str(error), *getattr(error, "__notes__", [])])
        _err.print(f"error: {message}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _settings(
    file: Path | None, bundle: Path | None, host: str | None, port: int | None, device: str | None, precision: str | None
) -> "DeploymentConfig":
    """The file's settings, or the defaults for one bundle, with what the command line says over them."""
    from deployments.config import parse_config, read_config

    data: dict[str, Any] = {"models": [{"path": str(bundle)}]}
    if file is not None:
        data = read_config(file).model_dump(mode="json", exclude_unset=True)
    data["http"] = data.get("http", {}) | {k: v for k, v in (("host", host), ("port", port)) if v is not None}
    data |= {k: v for k, v in (("device", device), ("precision", precision)) if v is not None}
    return parse_config(data, str(file or "command line"))


def _announce(endpoint: "Endpoint") -> None:
    _out.print(f"Serving at {endpoint.url}  (API: {endpoint.url}/docs)  Ctrl-C stops.", soft_wrap=True)
    if endpoint.metrics_url:
        _out.print(f"Prometheus metrics at {endpoint.metrics_url}")


def _wait_for_interrupt() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


def _show_example(endpoint: "Endpoint") -> None:
    """Sends the demo bundle's example request, raw feature values as a client has them, and prints what came back."""
    import statistics

    import httpx
    from rich.table import Table

    from deployments.launcher import LaunchError

    body = (_DEMO_BUNDLE / "example.json").read_bytes()
    headers = {"content-type": "application/json"}
    took_ms = []
    with httpx.Client(base_url=endpoint.url, headers=headers, timeout=30) as client:
        for _ in range(_DEMO_REQUESTS):
            start = time.perf_counter()
            answer = client.post("/v1/score", content=body)
            took_ms.append((time.perf_counter() - start) * 1e3)
            if answer.status_code != 200:
                raise LaunchError(f"{endpoint.url}/v1/score: got status {answer.status_code} {answer.text[:200]}, expected 200")
    result = answer.json()
    scores = result["scores"]
    columns = scores if isinstance(scores, dict) else {"score": scores}
    total = len(next(iter(columns.values())))
    table = Table("candidate", *columns, title=f"{result['model']} {result['version']} on {endpoint.config.device}")
    for i in range(min(total, _SHOWN_CANDIDATES)):
        table.add_row(str(i), *(f"{column[i]:.4f}" for column in columns.values()))
    if total > _SHOWN_CANDIDATES:
        table.add_row("...", *(f"{total} in all" for _ in columns))
    _out.print(table)
    timing = result["timing_ms"]
    steps = ", ".join(f"{step} {timing[step]:.2f}" for step in ("queue", "encode", "device"))
    first, median = took_ms[0], statistics.median(took_ms)
    _out.print(f"{_DEMO_REQUESTS} requests of {total} candidates over HTTP: first {first:.1f} ms, median {median:.2f} ms.")
    _out.print(f"Inside the last one, in ms: {steps}.")
    _out.print("Try it while the server is up (make serve):")
    curl = f"curl -s {endpoint.url}/v1/score -H 'content-type: application/json' -d @{_DEMO_BUNDLE / 'example.json'}"
    _out.print(f"  {curl}", markup=False, soft_wrap=True)
