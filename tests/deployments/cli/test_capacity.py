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

from deployments.cli.capacity import OURS, Load, Point, plan, read_points
from deployments.cli.main import app
from deployments.config import parse_config
from dpiframe_core.errors import ConfigError, InputError

ROOT = Path(__file__).parents[3]


def point(requests: float, p99: float = 5.0, candidates: int = 100, topology: Any = "fanin", gpus: int = 1) -> Point:
    return Point(topology, "m", candidates, requests, p99, gpus, 16, 8 * gpus if topology == "fanin" else 0, "here")


POINTS = [
    point(1000, 2.0), point(3000, 8.0), point(900, 3.0, topology="colocated"), point(500, 4.0, candidates=1000),
    point(1500, 3.0, gpus=2), point(2500, 12.0, candidates=1000, gpus=2),
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
        (lambda: Load(0, 100), "rows-per-s: got 0, expected more than 0"),
        (lambda: Load(1, 100, headroom=1.0), "headroom: got 1.0, expected at least 0 and less than 1"),
    ],
)
def test_what_was_not_measured_is_refused(load: Callable[[], Load], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(load(), POINTS)
    assert str(caught.value).startswith(message)


def test_our_figures_are_those_of_the_records() -> None:
    """To renew them: take the records of the files that it names as they are, with their run."""
    for file in json.loads(OURS.read_text()):
        source = json.loads((ROOT / file["file"]).read_text())
        assert file["run"] == source["run"]
        wanted = [
            r for r in source["records"]
            if r["system"] in ("dpiframe", "dpiframe-fanin") and r["cell"].get("form") == "binary" and r["model"] == "demo"
            and r["suite"] == "serving"
        ]  # fmt: skip
        assert file["records"] == [{k: r[k] for k in kept} for kept, r in zip(file["records"], wanted, strict=True)]


def test_only_loads_that_were_answered_are_points() -> None:
    points = read_points(OURS)
    assert {p.topology for p in points} == {"colocated", "fanin"}
    found = {(p.candidates, p.requests_per_s) for p in points if "h200/serving.json" in p.source}
    assert (100, 31822.0) in found
    assert (100, 2984.0) not in found  # of 3,719 that were offered
    assert (1000, 12382.0) not in found  # others were refused


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
    asked = ["capacity", "--rows-per-s", "3000000", "--candidates", "100", "--deadline-ms", "10"]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    assert "measured    31,822 requests/s of 100, p99 8.7 ms" in ran.output
    assert "benchmarks/results/h200/serving.json" in ran.output
    assert "needed      2 nodes: 2 GPUs, 2 engines, 16 ingresses, 32 cores" in ran.output
    line = ran.output.splitlines()[-1].removeprefix("configure   ")
    keys = dict(pair.split(": ") for pair in line.split(", "))
    config = parse_config(
        {"models": [{"path": "m"}]} | {k: int(v) if v.isdigit() else v for k, v in keys.items()}, "the command's"
    )
    assert (config.nodes, config.share_of_a_node(config.ingress_replicas)) == (2, 8)
    refused = CliRunner().invoke(app, [*asked, "--machine", "abacus"])
    assert refused.exit_code == 1
    assert "machine: got 'abacus', expected one of cpu, h200, h200-second-host" in refused.output
    own = CliRunner().invoke(app, [*asked, "--record", str(ROOT / "benchmarks/results/h200-second-host/serving.json")])
    assert "measured    19,759" in own.output  # 25,634 took 11.2 ms
