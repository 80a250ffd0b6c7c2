"""Plans from made-up measurements, that the figures we bring are those of the records, and what is refused."""

import json
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.records import capacity_figures
from deployments.cli.capacity import Form, Load, Point, Topology, Way, plan
from deployments.cli.capacity_points import OURS, read_points
from deployments.cli.main import app
from deployments.config import parse_config
from dpiframe_core.errors import ConfigError, InputError

ROOT = Path(__file__).parents[3]


def point(
    requests: float,
    p99: float = 5.0,
    candidates: int = 100,
    topology: Topology = "fanin",
    gpus: int = 1,
    form: Form = "binary",
    way: Way = "haproxy",
) -> Point:
    ingresses = 8 * gpus if topology == "fanin" else 0
    return Point(topology, form, way, "m", candidates, requests, p99, gpus, 16, ingresses, "here")


POINTS = [
    point(1000, 2.0), point(3000, 8.0), point(900, 3.0, topology="colocated"), point(500, 4.0, candidates=1000),
    point(1500, 3.0, gpus=2), point(2500, 12.0, candidates=1000, gpus=2), point(5000, way="direct"), point(200, form="columns"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("load", "nodes", "requests"),
    [
        (Load(100_000, 100), 1, 900),  # 1,000 requests/s, and both hold it: the one of fewer processes ...
        (Load(60_000, 100), 1, 900),
        (Load(100_000, 100, topology="fanin"), 1, 3000),
        (Load(100_000, 100, headroom=0), 1, 3000),
        (Load(210_000, 100), 1, 3000),
        (Load(210_001, 100), 2, 3000),
        (Load(210_000, 100, headroom=0.5), 2, 3000),
        (Load(210_000, 100, spare=1), 2, 3000),
        (Load(210_000, 100, deadline_ms=7.9), 3, 1000),
        (Load(210_000, 100, deadline_ms=8.0), 1, 3000),
        (Load(210_000, 101), 6, 500),  # 2,079 requests/s of more candidates than 100
        (Load(400_000, 1000, gpus_per_node=2), 1, 2500),
        (Load(350_000, 100, way="direct"), 1, 5000),
        (Load(28_100, 100, form="columns"), 3, 200),
    ],
)
def test_nodes_are_the_load_over_what_one_of_them_is_given(load: Load, nodes: int, requests: float) -> None:
    made = plan(load, POINTS)
    if (load, requests) == (Load(100_000, 100), 900):
        nodes, requests = 1, 3000  # ... but 900 at 70 % is not enough for 1,000
    assert (made.nodes, made.point.requests_per_s) == (nodes, requests)


@given(
    st.floats(1, 1e9), st.integers(1, 1000), st.none() | st.floats(4, 100), st.floats(0, 0.9), st.integers(0, 3), st.booleans()
)
def test_no_node_is_given_more_than_was_measured_less_the_headroom_and_one_less_would_be(
    rows: float, candidates: int, deadline: float | None, headroom: float, spare: int, one_gpu: bool
) -> None:
    load = Load(rows, candidates, deadline, headroom, spare, 1 if one_gpu else 2)
    try:
        made = plan(load, POINTS)
    except InputError:
        assert load.gpus_per_node == 2
        assert deadline is not None
        return
    serving = made.nodes - spare
    most = made.point.requests_per_s * (1 - headroom)
    assert made.point.candidates >= candidates
    assert deadline is None or made.point.p99_ms <= deadline
    assert rows / candidates <= serving * most * (1 + 1e-9)
    assert serving == 1 or rows / candidates > (serving - 1) * most * (1 - 1e-9)
    assert serving == ceil(rows / candidates / most)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: Load(1, 1001), "candidates: got 1001, expected at most 1000, the most that was measured; measure yours"),
        (lambda: Load(1, 100, 1.5), "deadline-ms: got 1.5, expected at least 2.00, the least p99 that was measured"),
        (lambda: Load(1, 100, gpus_per_node=8), "gpus-per-node and topology: got 8 and None, expected one of"),
        (
            lambda: Load(1, 100, form="arrow"),
            "form and way: got arrow haproxy, expected one of binary direct, binary haproxy, col",
        ),
        (lambda: Load(0, 100), "rows-per-s: got 0, expected more than 0"),
        (lambda: Load(float("nan"), 100), "rows-per-s: got nan, expected more than 0"),
        (lambda: Load(1, 100, headroom=1.0), "headroom: got 1.0, expected at least 0 and less than 1"),
    ],
)
def test_what_was_not_measured_is_refused(load: Callable[[], Load], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(load(), POINTS)
    assert str(caught.value).startswith(message)


def test_our_figures_are_those_of_the_records() -> None:
    """`python -m benchmarks report` renews them."""
    assert json.loads(OURS.read_text()) == capacity_figures.figures()


def test_only_loads_that_were_answered_are_points() -> None:
    points = read_points(OURS)
    assert {p.topology for p in points} == {"colocated", "fanin"}
    records = [r for file in json.loads(OURS.read_text()) for r in file["records"]]
    refused = {r["requests_per_s"] for r in records if r["failed"]}
    assert refused
    assert not refused & {p.requests_per_s for p in points}


def record(requests: float, suite: str = "serving", **more: Any) -> dict[str, Any]:
    cell = {"form": "binary", "connections": 64} | more.pop("cell", {})
    rest = {"system": "dpiframe-fanin", "model": "m", "batch": 100, "p99_us": 5000.0, "failed": {}}
    return {"suite": suite, "requests_per_s": requests, "cell": cell} | rest | more


BUDGET = "request_budget"


@pytest.mark.parametrize(
    ("records", "rates"),
    [
        ([record(900.0, cell={"rate": 1000}), record(980.0, cell={"rate": 1000})], [980]),
        ([record(980.0, cell={"rate": 1000}, load_limited=True), record(700.0, load_limited=True)], [700]),
        ([record(900.0, failed={"429": 3}), record(0.0, cell={"form": None}), record(5.0, cell={"form": "grpc"})], []),
        ([record(1000.0, BUDGET), record(100.0, BUDGET, model="n"), record(50.0, BUDGET, model="n", cell={"offered": 0.5})],
         [1000, 100, 50]),
        ([record(1000.0, BUDGET), record(480.0, BUDGET, cell={"offered": 0.5}), record(490.0, BUDGET, cell={"offered": 0.5})],
         [1000, 490]),
        ([record(490.0, BUDGET, cell={"offered": 0.5})], []),  # of what?
        ([record(2000.0, BUDGET, cell={"way": "direct"}), record(490.0, BUDGET, cell={"offered": 0.5})], [2000]),
        ([record(1.0, "latency"), record(2.0, system="mosec"), record(3.0, "serving_stages")], [3]),
    ],
)  # fmt: skip
def test_a_load_is_a_point_if_all_of_it_was_answered(records: list[dict[str, Any]], rates: list[float], tmp_path: Path) -> None:
    run = {"gpu": "G", "cpu": "x86_64, C, 32 cores", "commit": "c", "date": "2026-11-29T00:00"}
    always = record(1.0, system="dpiframe")
    (tmp_path / "r.json").write_text(json.dumps({"run": run, "records": [always, *records]}))
    assert [p.requests_per_s for p in read_points(tmp_path / "r.json")] == [1, *rates]


def test_records_say_which_way_and_how_many_processes_and_earlier_runs_count_too(tmp_path: Path) -> None:
    run = {"gpu": "G", "cpu": "x86_64, C, 32 cores", "commit": "c", "date": "2026-11-29T00:00"}
    records = [
        record(1.0, BUDGET, cell={"way": "direct", "ingress": 6, "form": "arrow"}),
        record(2.0, system="dpiframe-fanin-direct", ingress=6, cell={"gpus": 2, "cores": 16}),
    ]
    earlier = [{"run": run | {"gpu": None, "cpu": "y, 2 cores"}, "records": [record(3.0, system="dpiframe")]}]
    (tmp_path / "r.json").write_text(json.dumps({"run": run, "records": records, "other_cells": earlier}))
    found = [(p.topology, p.form, p.way, p.gpus, p.cores, p.ingresses) for p in read_points(tmp_path / "r.json")]
    assert found == [
        ("fanin", "arrow", "direct", 1, 32, 6), ("fanin", "binary", "direct", 2, 16, 12),
        ("colocated", "binary", "haproxy", 0, 2, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "expected records"), ("[]", "no load"), ('{"records": []}', "run"), ("5", "expected a valid dictionary")],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"x\.json: .*{why}"):
        read_points(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="No such file"):
        read_points(tmp_path / "none.json")


def test_the_command_says_what_it_counted_with_and_gives_a_configuration_that_is_one() -> None:
    asked = ["capacity", "--rows-per-s", "15000000", "--candidates", "100", "--deadline-ms", "10"]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    most = max(
        (p for p in read_points(OURS)
         if (p.form, p.way, p.gpus, p.candidates) == ("binary", "haproxy", 1, 100) and p.p99_ms <= 10),
        key=lambda p: p.requests_per_s,
    )  # fmt: skip
    assert f"measured    {most.requests_per_s:,.0f} requests/s of 100, p99 {most.p99_ms:.1f} ms" in ran.output
    assert f"fanin: 1 GPU, {most.cores} cores, 6 ingresses, model demo, binary ids, by HAProxy" in ran.output
    assert most.source in ran.output
    assert f"needed      2 nodes: 2 GPUs, 2 engines, 12 ingresses, {2 * most.cores} cores" in ran.output
    line = ran.output.splitlines()[-1].removeprefix("configure   ")
    keys = dict(pair.split(": ") for pair in line.split(", "))
    config = parse_config(
        {"models": [{"path": "m"}]} | {k: int(v) if v.isdigit() else v for k, v in keys.items()}, "the command's"
    )
    assert (config.nodes, config.share_of_a_node(config.ingress_replicas)) == (2, 6)
    direct = CliRunner().invoke(app, [*asked, "--form", "columns", "--way", "direct", "--deadline-ms", "100"])
    assert "JSON in columns, on the direct port" in direct.output
    refused = CliRunner().invoke(app, [*asked, "--machine", "abacus"])
    assert refused.exit_code == 1
    assert "machine: got 'abacus', expected one of cpu, cpu-amd, h200" in refused.output
    own = CliRunner().invoke(app, [*asked, "--record", str(ROOT / "benchmarks/results/h200-second-host/serving.json")])
    assert "measured    19,759" in own.output  # 25,634 took 11.2 ms
