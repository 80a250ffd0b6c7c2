"""The configuration of one deployment: one YAML file, parsed once into frozen data, unknown keys refused.

It knows neither Ray nor FastAPI: `launcher` and `application` turn it into processes, `http_app` enforces its `Limits`.
"""

import json
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from deployments.config_clients import Access, Grpc, Http
from deployments.config_faults import fault_lines
from deployments.config_load import Autoscaling, Batching
from deployments.config_models import ModelRef
from deployments.config_observed import Metrics, ScoreLog, Tracing
from dpiframe_core.errors import ConfigError, shown
from dpiframe_core.strict import Name, Strict
from dpiframe_core.strict_yaml import load_yaml

MOST_ENGINES = 16  # of one application on one node, in the fan-in
MOST_INGRESSES = 64


class Limits(Strict):
    """What one request may ask for. Candidates given as row objects, the slow form, have a bound of their own.

    `max_body_s`: from a request's headers to the end of its body.
    """

    max_body_bytes: Annotated[int, Field(ge=1024, le=2**30)] = 4 * 2**20
    max_body_s: Annotated[float, Field(gt=0, le=3600)] = 30
    max_rows_per_request: Annotated[int, Field(ge=1)] = 8192
    max_row_dicts: Annotated[int, Field(ge=1)] = 1000
    default_deadline_ms: Annotated[float, Field(gt=0)] | None = None


class DeploymentConfig(Strict):
    """Everything that starting one deployment needs. Relative bundle paths start at the working directory of the command.

    `models_root`, if set, is a folder that bundles must not leave, links included; models can then be replaced while the
    service runs (docs/lifecycle.md), and `models_state` is a file that remembers it over a restart. `profiles` is a folder of
    files that `dpiframe profile` wrote, `<model>.json`, for the status page. Without `access` it serves loopback alone.
    `topology`: "colocated" has HTTP, batching and engine in each of `replicas` processes; "fanin" has `replicas` engine
    processes, and `ingress_replicas` processes of HTTP and encoding beside them. Both are spread evenly over `nodes`.
    `max_ongoing_requests`, of those that go through Serve, is above what HAProxy lets through (4,096 connections), so that
    requests wait in our queue, which knows deadlines and bounds, and not before it. `drain_s` is how long requests in flight
    may still take when a replica or the whole service stops.
    """

    application: Name = "dpiframe"
    route_prefix: Annotated[str, Field(pattern=r"^/([A-Za-z0-9_\-]+(/[A-Za-z0-9_\-]+)*)?$")] = "/"
    models: Annotated[tuple[ModelRef, ...], Field(min_length=1)]
    models_root: Annotated[str, Field(min_length=1)] | None = None
    models_state: Annotated[str, Field(min_length=1)] | None = None
    profiles: Annotated[str, Field(min_length=1)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "tf32", "bf16", "fp8"] | None = None
    topology: Literal["colocated", "fanin"] = "colocated"
    ingress_replicas: Annotated[int, Field(ge=1, le=1024)] = 4
    cpus_per_ingress: Annotated[float, Field(gt=0)] = 1
    http: Http = Http()
    access: Access | None = None
    grpc: Grpc | None = None
    metrics: Metrics = Metrics()
    tracing: Tracing | None = None
    score_log: ScoreLog | None = None
    batching: Batching = Batching()
    limits: Limits = Limits()
    replicas: Annotated[int, Field(ge=1)] = 1
    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    autoscaling: Autoscaling | None = None
    cpus_per_replica: Annotated[float, Field(gt=0)] = 1
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 8192
    drain_s: Annotated[float, Field(ge=1, le=60)] = 3
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="after")
    def _queue_holds_a_request(self) -> Self:
        rows = self.limits.max_rows_per_request
        room = self.batching.most_queued(self.device if self.device == "cuda" else "cpu")  # auto: it may be one
        if rows > room:
            raise ValueError(f"limits.max_rows_per_request: got {rows}, expected at most batching.max_queued_rows {room}")
        return self

    @model_validator(mode="after")
    def _a_cpu_has_the_precision(self) -> Self:
        if self.device == "cpu" and self.precision in ("tf32", "fp8"):
            raise ValueError(f"precision: got {self.precision!r} for device 'cpu', expected fp32 or bf16")
        return self

    @model_validator(mode="after")
    def _one_way_to_count_replicas(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas: got both a number and autoscaling, expected one of the two")
        return self

    @model_validator(mode="after")
    def _ingress_replicas_are_of_the_fan_in(self) -> Self:
        for key in ("ingress_replicas", "cpus_per_ingress"):
            if self.topology != "fanin" and key in self.model_fields_set:
                raise ValueError(f"{key}: got a number for topology {self.topology!r}, expected topology 'fanin' with it")
        return self

    @model_validator(mode="after")
    def _engines_of_the_fan_in_find_a_name(self) -> Self:
        most = MOST_ENGINES * self.nodes
        if self.topology == "fanin" and self.max_replicas > most:
            key, more = "autoscaling.max_replicas" if self.autoscaling else "replicas", " a node" if self.nodes > 1 else ""
            raise ValueError(f"{key}: got {self.max_replicas} for topology 'fanin', expected at most {MOST_ENGINES}{more}")
        return self

    @model_validator(mode="after")
    def _every_node_has_its_share(self) -> Self:
        counts = {"autoscaling.max_replicas" if self.autoscaling else "replicas": self.max_replicas}
        if self.topology == "fanin":
            counts["ingress_replicas"] = self.ingress_replicas
        for key, count in counts.items():
            if count < self.nodes:
                raise ValueError(f"{key}: got {count} for nodes {self.nodes}, expected one or more for each")
        if ceil(self.ingress_replicas / self.nodes) > MOST_INGRESSES:
            raise ValueError(f"ingress_replicas: got {self.ingress_replicas}, expected at most {MOST_INGRESSES} a node")
        return self

    @model_validator(mode="after")
    def _one_version_is_live(self) -> Self:
        taken: dict[tuple[str | None, str | None], int] = {}
        for i, ref in enumerate(self.models):  # without a name: of one bundle, as what it is called stands in it
            if ref.canary is None and not ref.shadow:
                first = taken.setdefault((ref.name, None if ref.name else str(Path(ref.path))), i)
                if first != i:
                    where, got = f"models.{i}.name", f"{ref.name!r}, the name" if ref.name else "none for the bundle"
                    raise ValueError(f"{where}: got {got} of models.{first}, expected another one, or a canary or shadow of it")
        return self

    @model_validator(mode="after")
    def _budgets_are_of_the_colocated(self) -> Self:
        for i, model in enumerate(self.models):
            if self.topology == "fanin" and model.tables is not None and model.tables.miss_budget_ms is not None:
                where, got = f"models.{i}.tables.miss_budget_ms", model.tables.miss_budget_ms
                raise ValueError(f"{where}: got {got:g} for topology 'fanin', expected topology 'colocated' with it")
        return self

    @model_validator(mode="after")
    def _state_is_of_models_that_change(self) -> Self:
        if self.models_state is not None and self.models_root is None:
            raise ValueError("models_state: got a file without models_root, expected both (models change below a root alone)")
        return self

    @model_validator(mode="after")
    def _other_hosts_are_let_in_on_purpose(self) -> Self:
        tls = self.http.tls
        for key, host in (("http.host", self.http.host), ("http.tls.host", tls and tls.host)):
            if host == "0.0.0.0" and self.access is None:
                tokens = "access: {tokens: FILE} (--tokens), whose lines `dpiframe token` makes"
                rule = f"{tokens}; or access: {{open: true}} (--open), for anybody"
                raise ValueError(f"{key}: got '0.0.0.0' without access, expected {rule}")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        taken: dict[int, str] = {}
        for key, (_, port) in self.ports.items():
            if taken.setdefault(port, key) != key:
                raise ValueError(f"{key}: got {port}, the port of {taken[port].removesuffix('.port')}, expected another one")
        return self

    @property
    def ports(self) -> dict[str, tuple[str, int]]:
        """Host and port, by their keys, of all that others connect to."""
        host, tls = self.http.host, self.http.tls
        every = {"http.port": (host, self.http.port), "http.direct_port": (host, self.http.direct_port)}
        every |= {"grpc.port": (host, self.grpc.port if self.grpc else None), "metrics.port": ("0.0.0.0", self.metrics.port)}
        every |= {"http.tls.port": (tls.host, tls.port)} if tls else {}
        return {key: (host, port) for key, (host, port) in every.items() if port is not None}

    @property
    def first_replicas(self) -> int:
        return self.autoscaling.min_replicas if self.autoscaling else self.replicas

    @property
    def max_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas

    def share_of_a_node(self, replicas: int) -> int | None:
        """The most of so many replicas that one of `nodes` gets; None where there is one node alone."""
        return ceil(replicas / self.nodes) if self.nodes > 1 else None

    @property
    def cpus(self) -> float:
        """What all processes reserve at the most."""
        ingress = self.ingress_replicas * self.cpus_per_ingress if self.topology == "fanin" else 0.0
        remote = [m.tables.remote for m in self.models if m.tables is not None and m.tables.remote is not None]
        rows = sum(r.shards * r.replicas * r.cpus_per_shard for r in remote)
        return self.max_replicas * self.cpus_per_replica + ingress + rows

    @property
    def gpus_per_replica(self) -> int:
        """One whole GPU or none: several CUDA processes on one GPU only slice its time. Ask after `placed`."""
        return 1 if self.device == "cuda" else 0

    def placed(self, gpus: int) -> Self:
        """This configuration with `auto` replaced by the device that a host or cluster of `gpus` GPUs offers.

        Raises:
            ConfigError: fewer GPUs than the replicas that are started at once.
        """
        device = self.device if self.device != "auto" else ("cuda" if gpus else "cpu")
        if device == "cuda" and gpus < self.first_replicas:
            raise ConfigError(f"device: got {device!r} for {self.first_replicas} replica(s), expected a GPU each; found {gpus}")
        return self.model_copy(update={"device": device})

    def with_absolute_paths(self) -> Self:
        """For processes whose working directory is another."""
        access = self.access
        if access is not None and access.tokens is not None:
            access = access.model_copy(update={"tokens": str(Path(access.tokens).absolute())})
        folders: dict[str, object] = {key: _absolute(getattr(self, key)) for key in ("models_root", "models_state", "profiles")}
        if self.score_log is not None:
            folders["score_log"] = self.score_log.model_copy(update={"folder": _absolute(self.score_log.folder)})
        tls = self.http.tls
        if tls is not None:
            files = {key: _absolute(getattr(tls, key)) for key in ("certificate", "key", "client_ca")}
            folders["http"] = self.http.model_copy(update={"tls": tls.model_copy(update=files)})
        models = tuple(m.with_absolute_paths() for m in self.models)
        return self.model_copy(update={"models": models, "access": access, **folders})


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def read_config(path: str | Path) -> DeploymentConfig:
    """Parses one configuration file.

    Raises:
        ConfigError: one line a fault, `<file>: <key path>: got <value>, expected <rule>`.
    """
    try:
        data = load_yaml(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: got {error.strerror!r}, expected a readable file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return parse_config(data, str(path))


def parse_config(data: object, source: str) -> DeploymentConfig:
    """Checks parsed data, for example the `args` of a Serve application in a Kubernetes manifest.

    Raises:
        ConfigError: as `read_config`, with `source` in the file's place.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: got {shown(data)}, expected a mapping of keys")
    try:
        # Strict JSON mode: lists are tuples, but "8000" is no port and true no count.
        return DeploymentConfig.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(fault_lines(source, error, DeploymentConfig))) from None
