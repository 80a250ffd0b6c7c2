"""The overlays of k8s/, checked as an API server would check them, and against what they embed and what they name."""

import copy
import hashlib
import http.server
import io
import os
import re
import shlex
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deployments.config import parse_config
from deployments.metrics import LATENCY_BOUNDS_MS
from deployments.serve.serve_settings import FASTER, FLAGS, serve_settings
from dpiframe_core.errors import ConfigError
from tests.k8s.overlays import OVERLAYS, OWN_TOKENS, ROOT, Rendered, copied, environment, pods, ray_containers

CRD = ROOT.parent / "shared" / "k8s" / "ray.io_rayservices.v1.7.0.yaml"
OPEN = "x-kubernetes-preserve-unknown-fields"


@pytest.fixture(scope="module")
def served_schema() -> dict[str, Any]:
    if not CRD.exists():
        pytest.skip("KubeRay's CustomResourceDefinition is not in ../shared/k8s")
    versions = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    return next(v for v in versions if v["served"] and v["storage"])["schema"]["openAPIV3Schema"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("manifests"))


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, folder: Path) -> Rendered:
    return Rendered(folder / request.param)


@pytest.fixture
def multi_gpu(folder: Path) -> Rendered:
    return Rendered(folder / "multi-gpu")


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


def test_every_rayservice_passes_the_api_servers_validation(overlay: Rendered, served_schema: dict[str, Any]) -> None:
    validate(overlay.of("RayService"), served_schema)


CONTAINER = ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0)
WORKERS = ("spec", "rayClusterConfig", "workerGroupSpecs", 0)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("spec", "serveConfigV3"), "", "'serveConfigV3' was unexpected"),
        (("spec", "rayClusterConfig", "workerGroupSpec"), [], "'workerGroupSpec' was unexpected"),
        ((*WORKERS, "maxReplicas"), "8", "'8' is not of type 'integer'"),
        ((*CONTAINER, "imag"), "x", "'imag' was unexpected"),
        ((*WORKERS, "template", "spec", "initContainers", 0, "volumeMount"), [], "'volumeMount' was unexpected"),
        (("spec", "rayClusterConfig", "autoscalerOptions", "version"), "v3", "'v3' is not one of"),
        (("spec", "rayClusterConfig", "authOptions", "mode"), "none", "'none' is not one of"),
    ],
)
def test_a_misspelt_field_or_a_wrong_type_fails_that_validation(
    multi_gpu: Rendered, served_schema: dict[str, Any], path: tuple[str | int, ...], value: object, said: str
) -> None:
    service: Any = multi_gpu.of("RayService")
    at = service
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError, match=said):
        validate(service, served_schema)


def test_an_overlay_without_its_tokens_is_refused(tmp_path: Path) -> None:
    copied(tmp_path)
    (tmp_path / "k8s" / "overlays" / "cpu-kind" / "tokens.yaml").unlink()
    with pytest.raises(AssertionError, match=r"tokens\.yaml"):
        Rendered(tmp_path / "k8s" / "overlays" / "cpu-kind")


def test_both_serving_flags_and_what_is_faster_are_on_for_the_head_and_for_every_worker(overlay: Rendered) -> None:
    head, *workers = map(environment, ray_containers(overlay.of("RayService")))
    assert workers == [head] * len(workers)
    assert {flag: head.get(flag) for flag in FLAGS} == dict.fromkeys(FLAGS, "1")
    assert {name: head.get(name) for name in FASTER} == FASTER
    assert head["RAY_SERVE_REQUEST_LATENCY_BUCKETS_MS"] == ",".join(map(str, LATENCY_BOUNDS_MS))
    launched = serve_settings(overlay.config, Path("/tmp"), (20_000, 20_100, 20_200))
    alike = {name for name in head if name in launched}
    assert {name: head[name] for name in alike} == {name: launched[name] for name in alike}
    bounds = {"RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"}
    assert bounds | {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "RAY_worker_niceness"} <= alike


def test_probes_ask_serve_and_not_the_application(overlay: Rendered) -> None:
    """That the path exists, `test_deployed` shows. On a worker whose replicas have a port of their own, they are asked."""
    http = overlay.config.http
    of_serve = {"path": "/-/healthz", "port": http.port}
    head, worker = ray_containers(overlay.of("RayService"))
    assert head["readinessProbe"]["httpGet"] == of_serve
    direct = {"path": "/readyz", "port": http.direct_port}
    assert worker["readinessProbe"]["httpGet"] == (of_serve if http.direct_port is None else direct)
    for container in (head, worker):
        assert {"containerPort": http.port, "name": "serve"} in container["ports"]


def test_workers_have_the_gpus_and_cores_of_their_replicas_and_the_head_takes_none(overlay: Rendered) -> None:
    service, config = overlay.of("RayService"), overlay.config
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    head, worker = ray_containers(service)
    assert (
        cluster["headGroupSpec"]["rayStartParams"] | {"num-cpus": "0", "num-gpus": "0"}
        == cluster["headGroupSpec"]["rayStartParams"]
    )
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    resources = worker["resources"]
    assert resources["requests"] == resources["limits"]  # so that no other pod takes its cores
    gpus = int(group["rayStartParams"]["num-gpus"])
    assert int(resources["limits"].get("nvidia.com/gpu", 0)) == gpus
    assert bool(gpus) == (config.device == "cuda")
    each = gpus // config.gpus_per_replica if gpus else 1
    assert (group["minReplicas"] * each, group["maxReplicas"] * each) == (config.first_replicas, config.max_replicas)
    ingresses = config.ingress_replicas * config.cpus_per_ingress if config.topology == "fanin" else 0
    assert float(resources["limits"]["cpu"]) >= each * config.cpus_per_replica + ingresses
    if config.topology == "fanin":
        assert group["maxReplicas"] == 1  # its processes share memory


def test_workers_are_scaled_where_replicas_are_and_by_the_autoscaler_that_drains(overlay: Rendered) -> None:
    service = overlay.of("RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] == (overlay.config.autoscaling is not None)
    if overlay.config.autoscaling is not None:
        assert cluster["autoscalerOptions"]["version"] == "v2"
    assert {pod["spec"]["restartPolicy"] for pod in pods(service)} == {"Never"}  # as v2 asks for


def test_a_pod_that_stops_has_time_to_leave_the_endpoints_and_to_drain(overlay: Rendered) -> None:
    config, service = overlay.config, overlay.of("RayService")
    _, worker = ray_containers(service)
    word, seconds = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    drained = int(seconds) + (3 if config.topology == "fanin" else 1) * config.drain_s  # an engine outlasts its ingresses
    hard = int(environment(worker)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    for pod in pods(service):
        assert max(drained, int(seconds) + hard) < pod["spec"]["terminationGracePeriodSeconds"]
    assert float(environment(worker)["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"]) == config.drain_s


def test_the_embedded_configuration_agrees_with_what_surrounds_it(overlay: Rendered) -> None:
    (application,), config = overlay.serve["applications"], overlay.config
    assert application["import_path"] == "deployments.app:build"
    assert (config.application, config.route_prefix) == (application["name"], application["route_prefix"])
    assert overlay.serve["http_options"] == {"host": config.http.host, "port": config.http.port}


def selected(service: dict[str, Any], selector: dict[str, Any]) -> list[str]:
    """The roles of the pods that it selects."""
    assert set(selector) == {"matchLabels"}
    wanted = selector["matchLabels"].items()
    return [pod["metadata"]["labels"]["dpiframe/role"] for pod in pods(service) if wanted <= pod["metadata"]["labels"].items()]


def test_budget_policy_and_monitor_select_the_pods_that_they_are_for(overlay: Rendered) -> None:
    service = overlay.of("RayService")
    budget = overlay.of("PodDisruptionBudget")["spec"]
    assert selected(service, budget["selector"]) == ["worker"]
    assert budget["maxUnavailable"] == 1
    policy = overlay.of("NetworkPolicy")["spec"]
    assert selected(service, policy["podSelector"]) == ["head", "worker"]
    among = [peer["podSelector"] for rule in policy["ingress"] if "ports" not in rule for peer in rule["from"]]
    assert [selected(service, selector) for selector in among] == [["head", "worker"]]
    kinds = {one["kind"] for one in overlay.all()}
    on_a_gpu = overlay.config.device == "cuda"
    assert ({"PodMonitor", "PrometheusRule"} <= kinds) == on_a_gpu  # kind has no Prometheus operator
    if on_a_gpu:
        monitor = overlay.of("PodMonitor")["spec"]
        assert selected(service, monitor["selector"]) == ["head", "worker"]


def test_a_direct_port_has_a_service_of_the_workers_that_listen_there(overlay: Rendered) -> None:
    service, port = overlay.of("RayService"), overlay.config.http.direct_port
    found = [one["spec"] for one in overlay.all() if one["kind"] == "Service"]
    assert len(found) == (port is not None)
    for spec in found:
        assert selected(service, {"matchLabels": spec["selector"]}) == ["worker"]
        (exposed,) = spec["ports"]
        assert exposed["port"] == port
        assert {"containerPort": port, "name": exposed["targetPort"]} in ray_containers(service)[1]["ports"]


def test_the_overlay_with_a_direct_port_embeds_what_the_one_without_does(folder: Path) -> None:
    with_it, without = (Rendered(folder / name).serve for name in ("single-gpu-direct", "single-gpu"))
    assert with_it["applications"][0]["args"]["http"].pop("direct_port") == 8002
    assert with_it == without


def test_the_network_policy_names_ports_that_containers_open_and_lets_clients_reach_those_of_requests(
    overlay: Rendered,
) -> None:
    rules = overlay.of("NetworkPolicy")["spec"]["ingress"]
    assert all(rule["from"] for rule in rules)
    from_clients = [rule["ports"] for rule in rules if "dpiframe-client" in str(rule["from"])]
    direct = {overlay.config.http.direct_port} - {None}
    assert from_clients == [[{"protocol": "TCP", "port": port} for port in (overlay.config.http.port, *direct)]]
    named = {port["port"] for rule in rules for port in rule.get("ports", ())}
    opened = [{port["containerPort"] for port in c["ports"]} for c in ray_containers(overlay.of("RayService"))]
    assert named - direct <= opened[0]
    assert 8404 not in named
    assert opened[1] == named - {8265}  # the operator asks the head's dashboard


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["name"]: mount for mount in container.get("volumeMounts", ())}


def volumes(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}


def test_workers_have_the_tokens_as_a_whole_secret_and_the_head_has_not(overlay: Rendered) -> None:
    """Of a subPath a pod would never see the change."""
    service, config = overlay.of("RayService"), overlay.config
    head, worker = ray_containers(service)
    assert config.access is not None
    assert config.access.tokens is not None
    path = Path(config.access.tokens)
    secret = overlay.of("Secret")
    assert mounts(worker)["tokens"] == {"name": "tokens", "mountPath": str(path.parent), "readOnly": True}
    assert volumes(pods(service)[1])["tokens"]["secret"] == {"secretName": secret["metadata"]["name"]}
    assert secret["metadata"]["name"] == "dpiframe-tokens"  # a name that changed with it would replace the cluster
    assert list(secret["data"]) == [path.name]
    assert mounts(head) == {}


def test_workers_have_the_models_and_cannot_write_to_them(overlay: Rendered) -> None:
    service, config = overlay.of("RayService"), overlay.config
    _, worker = ray_containers(service)
    assert mounts(worker)["models"] == {"name": "models", "mountPath": config.models_root, "readOnly": True}
    assert config.models_root is not None
    for model in config.models:
        assert Path(model.path).is_relative_to(config.models_root)


def test_what_a_warm_up_finds_stays_on_the_node_in_a_folder_of_the_services_user(overlay: Rendered) -> None:
    service = overlay.of("RayService")
    _, pod = pods(service)
    _, worker = ray_containers(service)
    assert volumes(pod)["cache"]["hostPath"]["type"] == "DirectoryOrCreate"
    assert mounts(worker)["cache"]["mountPath"] == environment(worker)["XDG_CACHE_HOME"]
    (user,) = re.findall(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())
    own = next(c for c in pod["spec"]["initContainers"] if c["name"] == "own-cache")
    assert own["command"][own["command"].index("-o") + 1] == user
    assert own["command"][-1] == mounts(own)["cache"]["mountPath"] == environment(worker)["XDG_CACHE_HOME"]
    for one in pods(service):
        assert one["spec"]["securityContext"] == {"runAsNonRoot": True, "runAsUser": int(user)}
    for container in ray_containers(service):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_one_line_names_the_image_of_every_container(folder: Path, tmp_path: Path) -> None:
    copied(tmp_path)
    for name in OWN_TOKENS:
        file = tmp_path / "k8s" / "overlays" / name / "kustomization.yaml"
        text = file.read_text()
        assert text.count("newName: dpiframe, newTag: 0.1.0") == 1
        file.write_text(text.replace("newName: dpiframe, newTag: 0.1.0", "newName: registry/ctr, newTag: '7'"))
        service = Rendered(file.parent).of("RayService")
        specs = [pod["spec"] for pod in pods(service)]
        images = [c["image"] for spec in specs for c in (*spec["containers"], *spec.get("initContainers", ()))]
        assert len(images) >= 3
        assert set(images) == {"registry/ctr:7"}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def bundle_url(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """(the address of a tar of a bundle, its SHA-256)."""
    (tmp_path / "served").mkdir()
    file = tmp_path / "served" / "ctr-1.tar"
    with tarfile.open(file, "w") as tar:
        for name, text in (("model.yaml", b"name: ctr"), ("tables/a.safetensors", b"rows")):
            about = tarfile.TarInfo(name)
            about.size = len(text)
            tar.addfile(about, io.BytesIO(text))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(file.parent)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/{file.name}", hashlib.sha256(file.read_bytes()).hexdigest()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def downloading(tmp_path: Path) -> Rendered:
    """multi-gpu, with a download in the place of the claim, as its comment says."""
    folder = copied(tmp_path) / "multi-gpu"
    text = (folder / "kustomization.yaml").read_text()
    assert text.count("# - ../../components/download ") == 1
    (folder / "kustomization.yaml").write_text(text.replace("# - ../../components/download ", "- ../../components/download "))
    return Rendered(folder)


def job() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "k8s" / "models" / "job.yaml").read_text())
    return read


def run_script(container: dict[str, Any], to: Path, **variables: str) -> int:
    """The exit status of a container's own script, with a folder in the place of its mount."""
    said = environment(container)
    assert said["FOLDER"] == mounts(container)["models"]["mountPath"] == "/models"
    assert variables.keys() <= said.keys()
    to.mkdir(exist_ok=True)
    own = said | variables | {"FOLDER": str(to), "PATH": os.environ["PATH"], "no_proxy": "127.0.0.1"}
    return subprocess.run(container["command"], env=own, capture_output=True, check=False).returncode


def fetched(downloading: Rendered, to: Path, url: str, digest: str) -> int:
    (fetch,) = (c for c in pods(downloading.of("RayService"))[1]["spec"]["initContainers"] if c["name"] == "fetch-model")
    assert set(environment(fetch)) == {"FOLDER", "URL", "SHA256"}
    return run_script(fetch, to, URL=url, SHA256=digest)


def test_the_init_container_brings_the_bundle_where_the_configuration_says(
    downloading: Rendered, served_schema: dict[str, Any], bundle_url: tuple[str, str], tmp_path: Path
) -> None:
    service = downloading.of("RayService")
    validate(service, served_schema)
    assert "persistentVolumeClaim" not in volumes(pods(service)[1])["models"]
    url, digest = bundle_url
    assert fetched(downloading, tmp_path / "models", url, digest) == 0
    (model,) = downloading.config.models
    brought = tmp_path / "models" / Path(model.path).relative_to(str(downloading.config.models_root))
    assert (brought / "model.yaml").read_text() == "name: ctr"
    assert (brought / "tables" / "a.safetensors").read_bytes() == b"rows"
    assert [file.name for file in (tmp_path / "models").iterdir()] == [brought.name]


def test_the_job_puts_a_version_beside_others_whole_and_never_in_the_place_of_one(
    bundle_url: tuple[str, str], tmp_path: Path
) -> None:
    url, digest = bundle_url
    (fetch,) = job()["spec"]["template"]["spec"]["containers"]
    claim = tmp_path / "claim"
    (claim / "ctr-1").mkdir(parents=True)
    (claim / ".ctr-2.part" / "files").mkdir(parents=True)  # of a job whose node was lost
    assert run_script(fetch, claim, URL=url, SHA256=digest, NAME="ctr-2") == 0
    assert (claim / "ctr-2" / "model.yaml").read_text() == "name: ctr"
    assert (claim / "ctr-2" / "tables" / "a.safetensors").read_bytes() == b"rows"
    for name, sum_, where in (("ctr-2", digest, url), ("ctr-3", "0" * 64, url), ("ctr-3", digest, f"{url}.none")):
        assert run_script(fetch, claim, URL=where, SHA256=sum_, NAME=name) != 0
    assert sorted(file.name for file in claim.iterdir()) == ["ctr-1", "ctr-2"]
    assert sorted(file.name for file in (claim / "ctr-2").iterdir()) == ["model.yaml", "tables"]


def test_the_job_writes_to_the_claim_that_workers_read(folder: Path) -> None:
    claim = yaml.safe_load((ROOT / "k8s" / "models" / "claim.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    pod = job()["spec"]["template"]
    wanted = {"claimName": claim["metadata"]["name"]}
    assert volumes(pod)["models"]["persistentVolumeClaim"] == wanted
    for name in ("single-gpu", "multi-gpu"):
        overlay = Rendered(folder / name)
        own = pods(overlay.of("RayService"))[1]
        assert volumes(own)["models"]["persistentVolumeClaim"] == wanted | {"readOnly": True}
        user = own["spec"]["securityContext"]
        assert pod["spec"]["securityContext"] == user | {"fsGroup": user["runAsUser"]}


@pytest.mark.parametrize(("address", "digest"), [("{url}", "0" * 64), ("{url}.none", "{digest}")])
def test_a_download_that_fails_or_is_another_stops_the_pod_and_leaves_nothing(
    downloading: Rendered, bundle_url: tuple[str, str], tmp_path: Path, address: str, digest: str
) -> None:
    url, right = bundle_url
    status = fetched(downloading, tmp_path / "models", address.format(url=url), digest.format(digest=right))
    assert status != 0
    assert list((tmp_path / "models").iterdir()) == []


def test_the_redis_component_is_what_the_operator_takes(served_schema: dict[str, Any], tmp_path: Path) -> None:
    folder = copied(tmp_path) / "multi-gpu"
    text = (folder / "kustomization.yaml").read_text()
    (folder / "kustomization.yaml").write_text(text.replace("components:\n", "components:\n  - ../../components/redis\n"))
    service = Rendered(folder).of("RayService")
    validate(service, served_schema)
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "dpiframe-redis", "key": "password"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import
def test_the_embedded_file_holds_only_keys_that_serve_knows(overlay: Rendered) -> None:
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    (application,) = overlay.serve["applications"]
    assert set(overlay.serve) <= set(ServeDeploySchema.model_fields)
    assert set(application) <= set(ServeApplicationSchema.model_fields)
    ServeDeploySchema.model_validate(overlay.serve)


def test_an_unknown_key_in_the_embedded_configuration_is_refused_although_serve_would_not_mind(overlay: Rendered) -> None:
    (application,) = overlay.serve["applications"]
    with pytest.raises(ConfigError, match="args: max_ongoing_request: got an unknown key"):
        parse_config(application["args"] | {"max_ongoing_request": 5}, "args")


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
