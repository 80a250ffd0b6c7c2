"""The dashboard, the rules and the scrape configuration name metrics and labels that the code has, and no others."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deployments.config import parse_config
from deployments.telemetry import node_metrics
from dpiframe_core import errors

with warnings.catch_warnings():  # Ray Serve 2.60 uses what pydantic has deprecated
    warnings.simplefilter("ignore")
    from deployments.serve import ray_metrics

ROOT = Path(__file__).parents[1]
MONITORING = ROOT / "k8s" / "monitoring"
BY_SERVE = {"application", "deployment", "replica"}
WORDS = {"group_left", "and", "or", "unless", "offset"}
LISTS = re.compile(r"\b(by|on|ignoring) \(([^()]*)\)")
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{(.*?)\}")


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """The labels of every series that the code makes, by the name that Prometheus has it under."""
    found: dict[str, set[str]] = {node_metrics._LOST: set()}

    def kind(*suffixes: str) -> Any:
        def make(name: str, about: str, *rest: Any) -> SimpleNamespace:
            for suffix in suffixes:
                found[f"ray_{name}{suffix}"] = {*rest[-1], *BY_SERVE} | ({"le"} if suffix == "_bucket" else set())
            return SimpleNamespace()

        return make

    with pytest.MonkeyPatch.context() as patch:
        kinds = {"Counter": kind("_total"), "Gauge": kind(""), "Histogram": kind("_bucket", "_count", "_sum")}
        patch.setattr(ray_metrics, "metrics", SimpleNamespace(**kinds))
        ray_metrics.RayMetrics(interval_s=1000).close()
    for rule in rules():
        if "record" in rule:
            lists = re.match(r"\s*(?:sum|max) by \((.*?)\)", rule["expr"])
            assert lists is not None, rule
            found[rule["record"]] = set(lists[1].split(", "))
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return read


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert inner is not None
            yield variable["name"], f"max by ({inner[2]}) ({inner[1]})"


def names(expression: str) -> set[str]:
    """The metrics of an expression: what is no function, no word, no label, no duration and no variable of Grafana's."""
    bare = LISTS.sub("", expression)
    for inside in (r"\{.*?\}", r"\[.*?\]", r"\$\w+"):
        bare = re.sub(inside, " ", bare)
    found = re.findall(r"(?<![\w.])([a-zA-Z_:][\w:]*)(?!\w)(?!\s*\()", re.sub(r"\boffset \w+", " ", bare))
    return set(found) - WORDS


def test_the_reader_of_expressions_finds_names() -> None:
    said = 'max by (a, b) (rate(x_total{c="d", e=~"f.g"}[5m]) / 2) > 1e3 and on (a) sum(y:z:5m offset 1d) or absent(w) unless v'
    assert names(said) == {"x_total", "y:z:5m", "w", "v"}


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_and_label_of_an_expression_is_one_of_the_codes(
    metrics: dict[str, set[str]], where: str, expression: str
) -> None:
    used = names(expression)
    assert used, where
    assert used - metrics.keys() == set()
    for name, selector in SELECTOR.findall(expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= metrics[name]
    labels = {label for _, text in LISTS.findall(expression) for label in re.split(r",\s*", text)}
    assert labels <= set.union(*(metrics[name] for name in used))


def test_the_dashboard_shows_every_metric_and_the_page_says_what_each_is(metrics: dict[str, set[str]]) -> None:
    shown = set().union(*(names(expression) for _, expression in expressions()))
    stems = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in metrics if name.startswith("ray_")}
    unseen = {stem for stem in stems if not any(name.startswith(stem) for name in shown)}
    assert unseen == {"ray_dpiframe_device_busy_ms"}  # of all lanes: what `dpiframe_device_active_ms` is not
    page = (ROOT / "docs" / "operate.md").read_text()
    assert [stem for stem in stems if f"`{stem.removeprefix('ray_')}`" not in page] == []


def test_outcomes_that_count_as_our_faults_are_codes_of_errors() -> None:
    codes = {value.code for value in vars(errors).values() if isinstance(value, type) and hasattr(value, "code")}
    texts = [expression for _, expression in expressions()]
    outcomes = {o for text in texts for group in re.findall(r'outcome=~?"(.*?)"', text) for o in group.split("|")}
    assert outcomes >= {"deadline_exceeded", "overloaded"}
    assert outcomes <= codes


def test_there_is_an_alert_for_what_operators_are_woken_for() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert {name.removeprefix("DPIFrame") for name in alerts} == {
        "NoReplicaReady", "ErrorRate", "Latency", "QueueGrows", "DeviceFailures", "OovChanged", "ScoresDrift", "MetricsMissing",
    }  # fmt: skip
    assert all(rule["labels"]["severity"] in ("critical", "warning") for rule in alerts.values())
    assert all("summary" in rule["annotations"] for rule in alerts.values())


def test_panels_of_the_dashboard_lie_beside_each_other_on_one_page() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_pod_monitor_asks_the_port_that_pods_name_and_keeps_what_is_ours(metrics: dict[str, set[str]]) -> None:
    monitor = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    cluster = yaml.safe_load((ROOT / "k8s" / "base" / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (pod,) = group["template"]["spec"]["containers"]
        assert {"containerPort": 8080, "name": endpoint["port"]} in pod["ports"]
    keep, drop = endpoint["metricRelabelings"]
    made = {name for name in metrics if name.startswith("ray_")}
    assert all(re.fullmatch(keep["regex"], name) for name in made)
    used = set.union(*metrics.values())
    assert not [label for label in used if re.fullmatch(drop["regex"], label)]
    policy = (ROOT / "k8s" / "base" / "networkpolicy.yaml").read_text()
    assert "{protocol: TCP, port: 8080}" in policy


def test_the_scrape_configurations_of_the_page_are_yaml_that_names_the_two_ways() -> None:
    page = (ROOT / "docs" / "operate.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (scrape,) = [block for block in blocks if "scrape_configs" in block]
    (ours,) = [block for block in blocks if "metrics" in block]
    config = parse_config({"models": [{"path": "x"}], **ours}, "docs")
    targets = [t for job in scrape["scrape_configs"] for s in job["static_configs"] for t in s["targets"]]
    assert {int(target.rpartition(":")[2]) for target in targets} == {config.http.port, config.metrics.port}
