"""The `dpiframe models` commands: what a running service serves, and changes of it. Each is one call of its HTTP routes."""

from typing import Annotated, Any

import typer

from deployments.cli.terminal import one_line_errors, stdout
from dpiframe_core.errors import ConfigError, DPIFrameError, listed, shown
from dpiframe_core.strict_yaml import load_yaml

models_app = typer.Typer(no_args_is_help=True, help="Versions of a running service: list, load, share, roll back, unload.")

_OFF = "off"
Url = Annotated[str, typer.Option(help="The service. Its token comes from DPIFRAME_TOKEN.")]
Model = Annotated[str, typer.Argument(help="The model's name.")]
Version = Annotated[str, typer.Argument(help="A version of it.")]
OrOff = Annotated[str, typer.Argument(metavar="VERSION|off", help="A version of it, or off for none.")]
_HERE = "http://127.0.0.1:8000"


class Refused(DPIFrameError):
    """The service did not do it, or could not be reached."""


@models_app.command("list")
def list_(url: Url = _HERE) -> None:
    """Print every model, its versions and who gets its requests."""
    with one_line_errors():
        for model in _ask(url, "GET")["models"]:
            _show(_ask(url, "GET", model["name"], "versions"))


@models_app.command()
def load(
    model: Model,
    version: Version,
    path: Annotated[str | None, typer.Argument(help="Its bundle, from models_root on; none if it is loaded.")] = None,
    live: Annotated[bool, typer.Option(help="Whether it answers from then on.")] = True,
    tables: Annotated[
        str | None,
        typer.Option(metavar="YAML", help="Where its rows lie, as in a configuration: '{hbm_gib: 20, replan_s: 600}'."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for all replicas to be ready.")] = 600,
    new: Annotated[bool, typer.Option("--new", help="It is a further model: clients that name none are refused then.")] = False,
    url: Url = _HERE,
) -> None:
    """Load a version on every replica; once all are ready, have it answer."""
    body: dict[str, Any] = {"live": live, "timeout_s": timeout} | ({"path": path} if path is not None else {})
    with one_line_errors():
        body |= {"tables": _mapping(tables)} if tables is not None else {}
        if not new:
            _check_known(url, model)
    _change(url, "PUT", model, "versions", version, body=body, timeout_s=timeout)


@models_app.command()
def rollback(model: Model, url: Url = _HERE) -> None:
    """Have the version answer that did before the live one."""
    _change(url, "POST", model, "rollback")


@models_app.command()
def canary(
    model: Model,
    version: OrOff,
    percent: Annotated[float | None, typer.Argument(min=0, max=100, help="Of the requests.")] = None,
    by: Annotated[str | None, typer.Option(help="The feature by whose value requests stay with one version.")] = None,
    url: Url = _HERE,
) -> None:
    """Give a loaded version a share of the requests."""
    if (percent is None) != (version == _OFF):
        raise typer.BadParameter("expected VERSION PERCENT, or off")
    if version == _OFF:
        _change(url, "DELETE", model, "canary")
    else:
        _change(url, "PUT", model, "canary", body={"version": version, "percent": percent, "by": by})


@models_app.command()
def shadow(model: Model, version: OrOff, url: Url = _HERE) -> None:
    """Have a loaded version score what others answer, for comparison."""
    if version == _OFF:
        _change(url, "DELETE", model, "shadow")
    else:
        _change(url, "PUT", model, "shadow", body={"version": version})


@models_app.command()
def unload(model: Model, version: Version, url: Url = _HERE) -> None:
    """Unload a version that is not live."""
    _change(url, "DELETE", model, "versions", version)


@models_app.command()
def delete(model: Model, url: Url = _HERE) -> None:
    """Unload a model with all of its versions, unless the service has no other one."""
    with one_line_errors():
        left = _ask(url, "DELETE", model)["models"]
        stdout.print(f"served now: {', '.join(left)}", markup=False, soft_wrap=True)


def _check_known(url: str, model: str) -> None:
    """Raises ConfigError if the service does not have the model: a name misspelt would be a further one, and requests that name
    no model, as they may where there is one, would all be refused.
    """
    known = [served["name"] for served in _ask(url, "GET")["models"]]
    if model not in known:
        raise ConfigError(f"model: got {model!r}, expected {listed(known)}, or --new for a further model")


def _mapping(text: str) -> dict[str, Any]:
    try:
        read = load_yaml(text.encode())
    except ValueError as error:
        raise ConfigError(f"--tables: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"--tables: got {text!r}, expected a mapping, as {{hbm_gib: 20}}")
    return read


def _change(url: str, method: str, *path: str, body: dict[str, Any] | None = None, timeout_s: float = 60) -> None:
    with one_line_errors():
        _show(_ask(url, method, *path, body=body, timeout_s=timeout_s))


def _ask(url: str, method: str, *path: str, body: dict[str, Any] | None = None, timeout_s: float = 60) -> dict[str, Any]:
    """What the service says to a call of /v1/models/.., the parts of whose path are names."""
    import httpx

    from deployments.client.call import bearer, segment

    try:
        whole = "/".join((url.rstrip("/"), "v1", "models", *map(segment, path)))
    except ValueError as error:
        raise Refused(str(error)) from None
    try:
        answer = httpx.request(method, whole, json=body, headers=bearer(None), timeout=timeout_s + 60)
        said = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Refused(f"{url}: got {error or type(error).__name__}, expected a service of DPIFrame") from None
    match said:
        case {"error": {"message": str(message)}} if answer.status_code != 200:
            raise Refused(message)
        case {"model": _} | {"models": _} if answer.status_code == 200:
            return dict(said)
    raise Refused(f"{url}: got {answer.status_code}, {shown(answer.text)}, expected a service of DPIFrame")


def _show(state: dict[str, Any]) -> None:
    parts = [(state["live"], "live"), (state["previous"], "before"), (state["shadow"], "shadow")]
    if (canary := state["canary"]) is not None:
        parts.append((canary["version"], f"canary {canary['percent']:g} %" + (f" by {canary['by']}" if canary["by"] else "")))
    for release in state["versions"]:
        version = release["version"]
        part = ", ".join(part for of, part in parts if of == version) or "loaded"
        line = f"{state['model']} {version:<12} {part:<16} {release['path']}"
        stdout.print(line, markup=False, soft_wrap=True)
    behind = [replica["id"] for replica in state["replicas"] if not replica["current"]]
    for replica in state["replicas"]:
        for what, why in replica["failed"].items():
            stdout.print(f"{replica['id']} has no {what}: {why}", markup=False, soft_wrap=True)
    if behind:
        stdout.print(f"not there yet: {', '.join(behind)}", markup=False, soft_wrap=True)
