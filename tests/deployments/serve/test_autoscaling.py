"""How many replicas: the pure decision on recorded traces, and against a plant of replicas that take time to start."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config import parse_config
from deployments.config_load import Autoscaling
from deployments.serve.autoscaling import ReplicaLoad, Seen, decide, need
from deployments.serve.loaded_models import LoadMeter
from deployments.serve.serve_policy import loads_of, reported
from dpiframe_core.strict_yaml import load_yaml
from tests.docs.test_readme import blocks

ROOT = Path(__file__).parents[3]
RULES = Autoscaling(min_replicas=1, max_replicas=8, up_after_s=2, down_after_s=60)
IDLE = ReplicaLoad(0, 0, 0)


def busy(*shares: float, queued: float = 0) -> list[ReplicaLoad]:
    return [ReplicaLoad(queued, share, 0.01) for share in shares]


# One decision.


def test_replicas_are_needed_until_each_is_as_busy_as_the_target() -> None:
    assert need(busy(0.6, 0.6), RULES).up == 2
    assert need(busy(0.6, 0.61), RULES).up == 3
    assert need(busy(0.9, 0.9), replace_rules(target_busy=0.9)).up == 2


def test_a_busy_event_loop_counts_as_a_busy_device() -> None:
    host_bound = [ReplicaLoad(0, 0.1, 0.9)]
    assert need(host_bound, RULES) == need(busy(0.9), RULES)


def test_waiting_rows_need_replicas_even_where_nothing_is_busy() -> None:
    assert need([ReplicaLoad(8192, 0.1, 0.1)], RULES).up == 2
    assert need([ReplicaLoad(8193, 0.1, 0.1), IDLE], RULES).up == 3


def test_going_down_needs_room_below_the_target() -> None:
    """Two replicas at 0.3 would fit into one at 0.6, which is the target and leaves no room."""
    assert need(busy(0.3, 0.3), RULES).up == 1
    assert need(busy(0.3, 0.3), RULES).down == 2
    assert need(busy(0.2, 0.2), RULES).down == 1


def test_at_most_twice_the_replicas_that_report_are_asked_for() -> None:
    flood = [ReplicaLoad(10**9, 1, 1)]
    assert need(flood, RULES).up == 2
    assert need(flood * 3, RULES).up == 6
    assert need(flood * 5, RULES).up == 8


def test_the_bounds_hold_while_nobody_reports_and_nothing_is_remembered_from_before() -> None:
    seen = Seen(0.0, ((1.0, 8),), ((1.0, 8),))
    assert decide(seen, 100, 0, [], RULES) == (1, None)
    assert decide(None, 100, 9, [], RULES) == (8, None)


# Traces: a load in replicas' worth of work a second, as it was offered.


class Plant:
    """Replicas that share a load evenly, start after `start_s`, and queue what they cannot do; one decision a second."""

    def __init__(self, rules: Autoscaling, *, start_s: float = 10, rows_per_s: float = 100_000, look_back_s: int = 5) -> None:
        self.rules, self.start_s, self.rows_per_s, self.look_back_s = rules, start_s, rows_per_s, look_back_s
        self.seen: Seen | None = None
        self.now, self.target, self.queued = 0.0, rules.min_replicas, 0.0
        self.started = [-math.inf] * rules.min_replicas
        self.readings: list[tuple[float, float]] = []

    def second(self, work: float) -> int:
        self.now += 1
        running = sum(self.now - at >= self.start_s for at in self.started)
        rows = self.queued + work * self.rows_per_s
        done = min(rows, running * self.rows_per_s)
        self.queued = min(rows - done, running * 65536)  # beyond it clients get a 429
        share = done / (running * self.rows_per_s)
        self.readings = [*self.readings, (self.queued / running, share)][-self.look_back_s :]
        queued, share = (sum(column) / len(self.readings) for column in zip(*self.readings, strict=True))
        self.target, self.seen = decide(
            self.seen, self.now, self.target, [ReplicaLoad(queued, share, 0.0)] * running, self.rules
        )
        while len(self.started) < self.target:
            self.started.append(self.now)
        del self.started[self.target :]
        return self.target

    def run(self, work: Callable[[float], float], seconds: int) -> list[int]:
        return [self.second(work(self.now)) for _ in range(seconds)]


def changes(replicas: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(replicas) if a != b]


def test_a_step_up_is_answered_within_seconds_and_a_step_down_after_the_waiting_time() -> None:
    plant = Plant(RULES)
    assert set(plant.run(lambda t: 0.3, 120)) == {1}
    up = plant.run(lambda t: 3.0, 300)
    assert up.index(2) <= RULES.up_after_s + RULES.look_back_s
    moves = changes(up)  # up, beyond 3 / 0.6 while the queue drains, and once back from there
    assert moves == sorted(moves, key=lambda move: move < 0)
    assert 5 <= up[-1] <= 7
    down = plant.run(lambda t: 0.3, 300)
    assert set(down[: int(RULES.down_after_s) - 1]) == {up[-1]}
    assert down[-1] == 1


def test_a_spike_shorter_than_the_waiting_time_changes_nothing() -> None:
    plant = Plant(replace_rules(up_after_s=10))
    trace = plant.run(lambda t: 5.0 if 60 <= t < 63 else 0.4, 240)
    assert set(trace) == {1}


def test_spikes_that_return_before_the_waiting_time_is_over_find_the_replicas_still_there() -> None:
    plant = Plant(RULES)
    trace = plant.run(lambda t: 3.0 if t % 45 < 15 else 0.2, 900)
    settled = trace[200:]
    assert changes(settled) == []
    assert settled[0] > 1


def test_a_day_goes_up_and_down_once() -> None:
    """Twenty-four hours at a minute an hour: each replica count is passed once on the way up and once on the way down."""
    plant = Plant(RULES)
    day = 1440
    trace = plant.run(lambda t: 0.2 + 4.0 * math.sin(math.pi * t / day) ** 2, day)
    peak = trace.index(max(trace))
    assert max(trace) == 7  # 4.2 / 0.6
    assert all(change > 0 for change in changes(trace[: peak + 1]))
    assert all(change < 0 for change in changes(trace[peak:]))
    assert trace[-1] <= 2


def test_replicas_that_are_slow_to_start_are_not_asked_for_again() -> None:
    plant = Plant(RULES, start_s=120)
    assert max(plant.run(lambda t: 1.1, 110)) == 2


# Properties.

shares = st.floats(0, 1)
loads = st.lists(st.builds(ReplicaLoad, st.floats(0, 1e6), shares, shares), min_size=1, max_size=12)
rules = st.builds(
    lambda least, more, target, rows, up, down: Autoscaling(
        min_replicas=least, max_replicas=least + more, target_busy=target, target_queued_rows=rows,
        up_after_s=up, down_after_s=down,
    ),
    st.integers(1, 4), st.integers(0, 12), st.floats(0.05, 0.95), st.integers(1, 65536), st.integers(0, 5), st.integers(0, 20),
)  # fmt: skip


def decisions(traces: Sequence[Sequence[ReplicaLoad]], by: Autoscaling, start: int) -> list[int]:
    seen, replicas, out = None, start, []
    for second, trace in enumerate(traces):
        replicas, seen = decide(seen, float(second), replicas, trace, by)
        out.append(replicas)
    return out


@given(st.lists(st.one_of(st.just([]), loads), max_size=40), rules, st.integers(0, 20))
def test_the_bounds_always_hold(traces: list[list[ReplicaLoad]], by: Autoscaling, start: int) -> None:
    assert all(by.min_replicas <= n <= by.max_replicas for n in decisions(traces, by, start))


@given(st.data(), st.lists(loads, min_size=1, max_size=40), rules, st.integers(1, 12), st.integers(0, 4))
def test_more_load_never_means_fewer_replicas(
    data: st.DataObject, traces: list[list[ReplicaLoad]], by: Autoscaling, start: int, ahead: int
) -> None:
    heavier = []
    for trace in traces:
        more = data.draw(st.tuples(st.floats(0, 1e5), st.floats(0, 0.5), st.floats(0, 0.5)))
        heavier.append([ReplicaLoad(x.queued_rows + more[0], x.device_share + more[1], x.loop_share + more[2]) for x in trace])
    few, many = decisions(traces, by, start), decisions(heavier, by, start + ahead)
    assert all(a <= b for a, b in zip(few, many, strict=True))


@given(loads, rules, st.integers(1, 20))
def test_at_constant_figures_there_is_one_change_at_most(load: list[ReplicaLoad], by: Autoscaling, start: int) -> None:
    start = min(max(start, by.min_replicas), by.max_replicas)
    assert len(changes([start, *decisions([load] * 80, by, start)])) <= 1


@given(st.floats(0, 10), st.integers(1, 16), st.integers(0, 30))
def test_at_a_constant_load_replicas_settle_and_stay(work: float, start: int, start_s: int) -> None:
    """The plant closes the loop: figures fall as replicas come. Once what queued up has drained, nothing changes any more."""
    plant = Plant(Autoscaling(max_replicas=16, up_after_s=2, down_after_s=30), start_s=start_s)
    plant.target, plant.started = start, [-math.inf] * start
    plant.run(lambda t: work, 600)
    settled = plant.run(lambda t: work, 300)
    assert changes(settled) == []
    assert settled[0] >= min(16, math.ceil(work / 0.95))


@pytest.mark.bulk
@given(st.floats(0.1, 4), st.lists(st.floats(0.93, 1.07), min_size=300, max_size=300))
def test_a_few_per_cent_of_noise_do_not_bring_a_replica_and_take_it_away(work: float, noise: list[float]) -> None:
    plant = Plant(replace_rules(down_after_s=10), start_s=5)
    plant.run(lambda t: work * 1.07, 200)
    moves = changes(plant.run(lambda t: work * noise[int(t) % 300], 600))
    assert all(move < 0 for move in moves)
    assert len(moves) <= 2


@given(st.lists(st.tuples(st.integers(1, 3), loads), min_size=1, max_size=60), rules)
def test_what_is_remembered_gives_the_same_as_remembering_everything(
    steps: list[tuple[int, list[ReplicaLoad]]], by: Autoscaling
) -> None:
    seen, replicas, wanted, now = None, by.min_replicas, by.min_replicas, 0.0
    all_needs: list[tuple[float, int, int]] = []
    for passed, load in steps:
        now += passed
        replicas, seen = decide(seen, now, replicas, load, by)
        needed = need(load, by)
        all_needs.append((now, needed.up, needed.down))
        age = now - all_needs[0][0]
        least = min(u for t, u, _ in all_needs if t > now - by.up_after_s or t == now) if age >= by.up_after_s else 0
        most = max(d for t, _, d in all_needs if t > now - by.down_after_s or t == now) if age >= by.down_after_s else 99
        wanted = max(min(max(wanted, least), max(most, least), by.max_replicas), by.min_replicas)
        assert replicas == wanted


# What is reported, and how it comes back.


class FakeBatcher:
    def __init__(self) -> None:
        self.busy_s, self.queued_rows = 0.0, 0


def test_shares_are_of_the_time_since_the_last_reading() -> None:
    now, cpu = 10.0, 3.0
    meter = LoadMeter(lambda: now, lambda: cpu)
    one, two = FakeBatcher(), FakeBatcher()
    now, cpu, one.busy_s, one.queued_rows, two.queued_rows = 12.0, 3.5, 1.0, 7, 5
    assert meter.read([one, two]) == ReplicaLoad(12, 0.5, 0.25)
    now, two.busy_s = 14.0, 0.5
    assert meter.read([one, two]) == ReplicaLoad(12, 0.25, 0)


def test_a_batch_longer_than_the_period_and_clocks_that_stand_still_give_shares_all_the_same() -> None:
    now, cpu = 0.0, 0.0
    meter = LoadMeter(lambda: now, lambda: cpu)
    batcher = FakeBatcher()
    now, batcher.busy_s, cpu = 1.0, 9.0, 1.5
    assert meter.read([batcher]) == ReplicaLoad(0, 1, 1)
    assert meter.read([batcher]) == ReplicaLoad(0, 0, 0)


def test_only_replicas_that_reported_every_figure_count() -> None:
    first, second = ReplicaLoad(1, 0.2, 0.3), ReplicaLoad(4, 0.5, 0.6)
    figures = {name: {"a": value, "b": reported(second)[name]} for name, value in reported(first).items()}
    assert loads_of(figures) == [first, second]
    del figures["loop_share"]["b"]
    assert loads_of(figures) == [first]
    assert loads_of({"running_requests": {"a": 3}}) == []


def replace_rules(**changed: float) -> Autoscaling:
    return RULES.model_copy(update=changed)


@pytest.mark.parametrize("name", ["queued_rows", "device_share", "loop_share"])
def test_every_figure_counts(name: str) -> None:
    high = {"queued_rows": 1e6, "device_share": 1.0, "loop_share": 1.0}[name]
    assert need([replace(IDLE, **{name: high})], RULES).up == 2


def test_the_code_of_the_documentation_is_right() -> None:
    settings, example = blocks((ROOT / "docs" / "autoscaling.md").read_text())
    config = parse_config({"models": [{"path": "m"}], **load_yaml(settings.code.encode())}, "docs")
    assert config.autoscaling == replace_rules(down_after_s=120)
    ran: dict[str, object] = {}
    exec(example.code, ran)
    assert ran["replicas"] == 2
