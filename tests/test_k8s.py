"""The manifests in k8s/, checked as an API server would check them, and what they embed, as we check it ourselves."""

import copy
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deployments.config import DeploymentConfig, parse_config
from deployments.serve.cluster import FASTER, FLAGS, serve_settings
from dpiframe_core.errors import ConfigError

ROOT = Path(__file__).parents[1]
CRD = ROOT.parent / "shared" / "k8s" / "ray.io_rayservices.v1.7.0.yaml"
OPEN = "x-kubernetes-preserve-unknown-fields"


@pytest.fixture(scope="module")
def served_schema() -> dict[str, Any]:
    if not CRD.exists():
        pytest.skip("KubeRay's CustomResourceDefinition is not in ../shared/k8s")
    versions = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    return next(v for v in versions if v["served"] and v["storage"])["schema"]["openAPIV3Schema"]


@pytest.fixture
def manifest() -> dict[str, Any]:
    # A round trip: YAML aliases would make two places of the manifest one object.
    return copy.deepcopy(yaml.safe_load(yaml.safe_dump(yaml.safe_load((ROOT / "k8s" / "rayservice.yaml").read_text()))))


def closed(schema: Any) -> Any:
    """JSON Schema of a structural schema: objects take the properties they name and no others, int-or-string is either."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: v if k in ("default", "enum", "required") else closed(v) for k, v in schema.items() if k != "properties"}
    if out.pop("x-kubernetes-int-or-string", False):
        out.pop("type", None)
        out["type"] = ["integer", "string"]
    if "properties" in schema:
        out["properties"] = {name: closed(s) for name, s in schema["properties"].items()}
        if not schema.get(OPEN) and "additionalProperties" not in schema:
            out["additionalProperties"] = False
    return out


def admitted(value: Any, schema: dict[str, Any]) -> Any:
    """`value` without its nulls and with the schema's defaults, as it is before validation."""
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        out = {k: copy.deepcopy(s["default"]) for k, s in properties.items() if "default" in s}
        out |= {k: v for k, v in value.items() if v is not None}
        return {k: admitted(v, properties.get(k, rest if isinstance(rest, dict) else {})) for k, v in out.items()}
    if isinstance(value, list):
        return [admitted(v, schema.get("items", {})) for v in value]
    return value


def validate(manifest: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(closed(admitted_schema(schema))).validate(admitted(manifest, admitted_schema(schema)))


def admitted_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Every object has these three at its root, whatever its schema says of `metadata`."""
    properties = schema["properties"] | {"metadata": {"type": "object", OPEN: True}}
    return schema | {"properties": properties}


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterConfig"]
    return [group["template"]["spec"]["containers"][0] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_rayservice_passes_the_api_servers_validation(manifest: dict[str, Any], served_schema: dict[str, Any]) -> None:
    validate(manifest, served_schema)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("spec", "serveConfigV3"), "", "'serveConfigV3' was unexpected"),
        (("spec", "rayClusterConfig", "workerGroupSpec"), [], "'workerGroupSpec' was unexpected"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "maxReplicas"), "8", "'8' is not of type 'integer'"),
        (
            ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "imag"),
            "x",
            "'imag' was unexpected",
        ),
        (("spec", "rayClusterConfig", "authOptions", "mode"), "none", "'none' is not one of"),
    ],
)
def test_a_misspelt_field_or_a_wrong_type_fails_that_validation(
    manifest: dict[str, Any], served_schema: dict[str, Any], path: tuple[str | int, ...], value: object, said: str
) -> None:
    at: Any = manifest
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError, match=said):
        validate(manifest, served_schema)


def test_both_serving_flags_and_what_is_faster_are_on_for_the_head_and_for_every_worker(manifest: dict[str, Any]) -> None:
    for container in containers(manifest):
        env = {e["name"]: e["value"] for e in container["env"]}
        assert {flag: env.get(flag) for flag in FLAGS} == dict.fromkeys(FLAGS, "1"), container["name"]
        assert {name: env.get(name) for name in FASTER} == FASTER, container["name"]


def test_probes_ask_serve_and_not_the_application(manifest: dict[str, Any]) -> None:
    for container in containers(manifest):
        assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}


def test_the_head_takes_no_replica_and_each_worker_has_one_gpu(manifest: dict[str, Any]) -> None:
    cluster = manifest["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    head, *workers = containers(manifest)
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert workers
    for worker in workers:
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert worker["resources"]["requests"] == worker["resources"]["limits"]


def embedded(manifest: dict[str, Any]) -> tuple[dict[str, Any], DeploymentConfig]:
    serve_config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = serve_config["applications"]
    return serve_config, parse_config(application["args"], "args")


def test_the_embedded_configuration_passes_our_own_schema_and_agrees_with_what_surrounds_it(manifest: dict[str, Any]) -> None:
    serve_config, config = embedded(manifest)
    (application,) = serve_config["applications"]
    assert application["import_path"] == "deployments.app:build"
    assert (config.application, config.route_prefix) == (application["name"], application["route_prefix"])
    assert serve_config["http_options"] == {"host": config.http.host, "port": config.http.port}
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert config.autoscaling is not None
    assert (group["minReplicas"], group["maxReplicas"]) == (config.autoscaling.min_replicas, config.max_replicas)
    assert float(containers(manifest)[1]["resources"]["requests"]["cpu"]) >= config.cpus_per_replica
    env = {e["name"]: e["value"] for e in containers(manifest)[1]["env"]}
    assert float(env["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"]) == config.drain_s
    launched = serve_settings(config, Path("/tmp"), (20_000, 20_100))
    assert env["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] == launched["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"]


def test_tokens_come_as_a_whole_secret_to_every_container_that_reads_them(manifest: dict[str, Any]) -> None:
    """Of a subPath a pod would never see the change."""
    _, config = embedded(manifest)
    assert config.access is not None
    assert config.access.tokens is not None
    assert config.models_root == "/models"
    cluster = manifest["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "tokens"]
        assert mount == {"name": "tokens", "mountPath": str(Path(config.access.tokens).parent), "readOnly": True}
        assert [v["secret"] for v in spec["volumes"] if v["name"] == "tokens"] == [{"secretName": "dpiframe-tokens"}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import
def test_the_embedded_file_holds_only_keys_that_serve_knows(manifest: dict[str, Any]) -> None:
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    serve_config, _ = embedded(manifest)
    (application,) = serve_config["applications"]
    assert set(serve_config) <= set(ServeDeploySchema.model_fields)
    assert set(application) <= set(ServeApplicationSchema.model_fields)
    ServeDeploySchema.model_validate(serve_config)


def test_an_unknown_key_in_the_embedded_configuration_is_refused_although_serve_would_not_mind(
    manifest: dict[str, Any],
) -> None:
    serve_config, _ = embedded(manifest)
    (application,) = serve_config["applications"]
    args = application["args"] | {"max_ongoing_request": 5}
    with pytest.raises(ConfigError, match="args: max_ongoing_request: got an unknown key"):
        parse_config(args, "args")


def test_the_network_policy_lets_clients_reach_the_service_port_only() -> None:
    policy = yaml.safe_load((ROOT / "k8s" / "networkpolicy.yaml").read_text())
    from_clients = [r for r in policy["spec"]["ingress"] if "dpiframe-client" in str(r["from"])]
    assert [r["ports"] for r in from_clients] == [[{"protocol": "TCP", "port": 8000}]]
    open_ports = {p["port"] for r in policy["spec"]["ingress"] for p in r.get("ports", [])}
    assert 8404 not in open_ports
    assert all(r["from"] for r in policy["spec"]["ingress"])


def test_the_ingress_that_the_page_shows_ends_tls_in_front_of_the_service() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (block,) = [b.split("```")[0] for b in page.split("```yaml\n")[1:] if "kind: Ingress" in b]
    spec = yaml.safe_load(block)["spec"]
    (rule,) = spec["rules"]
    assert spec["tls"] == [{"hosts": [rule["host"]], "secretName": "dpiframe-tls"}]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "dpiframe-serve-svc", "port": {"number": 8000}}


def instructions() -> list[tuple[str, str]]:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")]


def test_the_dockerfile_pins_its_base_and_runs_as_a_user_without_rights() -> None:
    dockerfile = instructions()
    (base,) = [rest for word, rest in dockerfile if word == "FROM"]
    image, _, tag = base.partition(":")
    assert image == "nvidia/cuda"
    assert tag.startswith("13.")
    assert "runtime" in tag
    (user,) = [rest for word, rest in dockerfile if word == "USER"]
    assert user not in ("root", "0")
    assert [word for word, _ in dockerfile].index("USER") < [word for word, _ in dockerfile].index("ENTRYPOINT")
    assert ("EXPOSE", "8000") in dockerfile


def test_the_dockerfile_carries_both_flags_and_no_secret_and_copies_what_exists() -> None:
    dockerfile = instructions()
    text = (ROOT / "Dockerfile").read_text()
    environment = " ".join(rest for word, rest in dockerfile if word == "ENV")
    assert all(f"{flag}=1" in environment for flag in FLAGS)
    assert {f"{name}={value}" for name, value in FASTER.items()} <= set(shlex.split(environment))
    assert ":latest" not in text
    for word in ("password", "secret", "token", "api_key", "ADD "):
        assert word not in text
    for word, rest in dockerfile:
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source


def test_the_image_has_what_triton_and_the_cpus_lookup_are_built_with() -> None:
    (packages,) = [rest for word, rest in instructions() if word == "RUN" and "apt-get install" in rest]
    assert {"gcc", "libc6-dev", "python3.12-dev"} <= set(packages.split())


def test_the_dockerfile_installs_the_torch_that_the_makefile_pins() -> None:
    pinned = next(
        line.split("?=")[1].strip() for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TORCH")
    )
    assert pinned in (ROOT / "Dockerfile").read_text()
