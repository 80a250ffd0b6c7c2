"""The load generator counts what it says, requests are the same in every form, and aims are judged from records."""

import json
import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from benchmarks.host_cores import _turn, core_ticks, turns_per_s
from benchmarks.records.record import record
from benchmarks.report.results import Results
from benchmarks.report.serving_aims import SERVING_CPU_AIMS, SERVING_GPU_AIMS, WIDE
from benchmarks.report.serving_tables import serving as serving_table
from benchmarks.serving.load import compiled, drive, joined, request_bytes
from benchmarks.serving.payloads import FORMS, Payloads
from benchmarks.serving.peers.model import PeerModel
from benchmarks.serving.scaling import Plan
from benchmarks.serving.systems import PEERS, missing, on_cores, our_config, python_of
from benchmarks.serving.wide import widened
from benchmarks.timing import Times
from deployments.config import parse_config
from deployments.demo.export import build_demo_bundle
from deployments.demo.train import TrainingPlan
from dpiframe_core.bundle.bundle import Bundle, read_bundle
from kernels.runtime.cores import usable_cores

pytestmark = pytest.mark.bulk


class Served(BaseHTTPRequestHandler):
    """Keeps the bodies it gets. One in three requests is refused if `refuse` is set; the first one waits `stall_s`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: two would wait for an acknowledgement
    seen: list[bytes]
    refuse = False
    stall_s = 0.0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append(body)
        if len(self.seen) == 1:
            time.sleep(self.stall_s)
        self.send_response(429 if self.refuse and len(self.seen) % 3 == 0 else 200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"abc")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server(**settings: object) -> Iterator[tuple[int, list[bytes]]]:
    seen: list[bytes] = []
    own = type("Own", (Served,), {"seen": seen, **settings})
    with ThreadingHTTPServer(("127.0.0.1", 0), own) as http:
        http.handle_error = lambda *_: None  # the generator leaves without waiting for the last answer
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield http.server_port, seen
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def requests_of() -> object:
    try:
        compiled()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return lambda port, bodies: [request_bytes(port, "/score", body, {"Content-Type": "text/plain"}) for body in bodies]


def test_each_connection_sends_every_request_in_turn(requests_of):
    bodies = [b"first", b"second" * 40_000, b"third"]
    with server() as (port, seen):
        load = drive(port, requests_of(port, bodies), connections=1, seconds=0.3, warm_s=0)
    assert not load.failed
    assert 0 <= len(seen) - load.times.calls <= 2  # one may be answered after the end, and another one sent
    start = bodies.index(seen[0])
    assert seen == [bodies[(start + i) % 3] for i in range(len(seen))]


def test_refused_requests_are_counted_by_status_and_have_no_latency(requests_of):
    with server(refuse=True) as (port, seen):
        load = drive(port, requests_of(port, [b"x"]), connections=1, seconds=0.3, warm_s=0)
    assert load.failed.keys() == {"429"}
    assert 0 <= len(seen) - load.times.calls - load.failed["429"] <= 2
    assert load.times.calls == pytest.approx(2 * load.failed["429"], abs=2)


def test_a_stall_counts_for_every_request_that_was_due_meanwhile(requests_of):
    """In closed loop one request would be slow; here half of them were due while the server slept."""
    with server(stall_s=0.5) as (port, seen):
        load = drive(port, requests_of(port, [b"x"]), connections=1, seconds=1, warm_s=0, rate=200)
    assert load.times.calls == len(seen)
    assert load.times.p99_us > 400_000
    with server(stall_s=0.5) as (port, seen):
        one_slow = drive(port, requests_of(port, [b"x"]), connections=1, seconds=1, warm_s=0)
    assert one_slow.times.p50_us < 400_000


def test_a_stall_is_told_from_a_server_that_is_always_slow_by_when_the_slowest_requests_were_due(requests_of):
    with server(stall_s=1.8) as (port, _):
        load = drive(port, requests_of(port, [b"x"]), connections=1, seconds=2, warm_s=0, rate=200)
    first, _, last = load.slow_ms
    assert 0 <= first <= last < 300  # the stall is the first request's: those that were due first waited for longest
    assert load.unsent_p99_us > 1_500_000  # and for a free connection, not for the server
    assert load.late_p99_us < 1_500_000  # nor for the generator
    assert not load.limited


def test_a_stall_of_the_generator_is_its_own_whether_or_not_a_connection_is_free(requests_of):
    with server() as (port, _):
        command = [str(compiled()), "127.0.0.1", str(port), "1", "200", "0", "1.5", "0"]
        own = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (request,) = requests_of(port, [b"x"])
        own.stdin.write(struct.pack("<I", len(request)) + request)
        own.stdin.close()
        own.stdin = None
        time.sleep(0.3)
        own.send_signal(signal.SIGSTOP)
        time.sleep(1)
        own.send_signal(signal.SIGCONT)
        load = joined([own.communicate()[0]])
    assert load.times.p99_us > 700_000
    assert load.late_p99_us > 700_000
    assert load.limited


def test_what_the_warm_up_meets_is_in_no_figure_but_in_the_number_answered(requests_of):
    with server(stall_s=0.9) as (port, seen):
        load = drive(port, requests_of(port, [b"x"]), connections=4, seconds=0.5, warm_s=1, rate=100)
    assert load.times.p99_us < 800_000
    assert load.times.calls < load.answered == len(seen)


def test_requests_that_nobody_answers_are_told(requests_of):
    with server(stall_s=6) as (port, _), pytest.raises(RuntimeError, match=r"load: got no good answer .* unanswered: [1-9]"):
        drive(port, requests_of(port, [b"x"]), connections=1, seconds=0.2, warm_s=0, rate=100)


def test_the_figures_of_load_processes_are_put_together():
    def output(latencies: list[float], **changed: object) -> bytes:
        head = {"answered": 2, "seconds": 0.5, "unanswered": 0, "reconnects": 1, "cpu_share": 0.2,
                "answered_in_all": 3, "begin_s": 7.0, "kept": len(latencies), "status": {"200": 2}, **changed}  # fmt: skip
        rows = [(latency, latency / 10, latency / 20, 1000 * latency) for latency in latencies]
        return json.dumps(head).encode() + b"\n" + b"".join(struct.pack("<4f", *row) for row in rows)

    load = joined(
        [output([10, 20]), output([30], answered=4, unanswered=3, cpu_share=0.95, begin_s=7.5, status={"200": 1, "503": 2})]
    )
    assert (load.times.calls, load.requests_per_s, load.reconnects) == (3, 12.0, 2)
    assert load.times.p50_us == pytest.approx(20)
    assert load.slow_ms == pytest.approx((530, 530, 530))  # the second process began half a second later
    assert load.unsent_p99_us == pytest.approx(3, abs=0.1)
    assert load.late_p99_us == pytest.approx(1.5, abs=0.05)
    assert load.answered == 6
    assert load.failed == {"503": 2, "unanswered": 3}
    assert load.limited


def test_what_a_host_steals_is_part_of_what_its_machine_wanted_and_idle_time_is_not(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 1 5 100 2 3 4 6 0 0\ncpu0 10 1 5 100 2 3 4 6 0 0\n")
    assert core_ticks(stat) == (10 + 1 + 5 + 3 + 4 + 6, 6)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("serving") / "demo"
    build_demo_bundle(path, rows=3000, plan=TrainingPlan(hidden_units=(8,), epochs=1), progress=False)
    return read_bundle(path)


def test_every_form_holds_the_same_rows_whose_scores_are_the_source_models(bundle: Bundle):
    payloads, model = Payloads.draw(bundle, 7, 0), PeerModel(bundle.path, "cpu")
    for form in FORMS:
        headers, bodies = payloads.bodies(form)
        assert headers["Content-Type"].startswith("application/")
        blocks = [model.reader(form)(body) for body in bodies]
        for scores, expected in zip(model.scores(blocks), payloads.scores, strict=True):
            assert np.abs(scores - expected).max() <= 1e-5
        headers, batched = payloads.bodies(form, batched=True)
        for body, plain in zip(batched, bodies, strict=True):
            head, tensors = json.loads(body[: (end := int(headers["Inference-Header-Content-Length"]))]), body[end:]
            assert all(one["shape"][0] == 1 for one in head["inputs"])  # one request of a batch
            assert tensors == (plain.partition(b"\n")[2] if form == "binary" else plain)
    _, wrapped = payloads.bodies("rows", wrapped=True)
    assert [list(json.loads(body)) for body in wrapped] == [["requests"]] * len(wrapped)
    model.engine.close()


def test_a_widened_model_has_other_layers_over_the_same_tables_and_serves_the_same_requests(bundle: Bundle, tmp_path: Path):
    wide = widened(bundle, (24, 16), tmp_path / "wide", seed=1)
    assert [wide.dense[f"deep.{i}.weight"].shape[0] for i in (0, 1)] == [24, 16]
    assert wide.tables.keys() == bundle.tables.keys()
    assert all(torch.equal(wide.tables[name], table) for name, table in bundle.tables.items())
    payloads, model = Payloads.draw(wide, 7, 0), PeerModel(wide.path, "cpu")
    for scores, expected in zip(model.scores(payloads.blocks), payloads.scores, strict=True):
        assert np.abs(scores - expected).max() <= 1e-5
    assert np.concatenate(payloads.scores).std() > 1e-3  # scores that differ: the check means something
    model.engine.close()


def test_loops_are_counted_on_the_cores_that_the_process_has(monkeypatch: pytest.MonkeyPatch):
    pinned: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(set(cores)))
    counts: SimpleQueue[float] = SimpleQueue()
    _turn(3, threading.Barrier(1), 0.05, counts)
    assert pinned == [{3}]
    assert counts.get() > 0
    monkeypatch.undo()
    with on_cores(1):
        assert turns_per_s(seconds=0.05) > 0


def test_requests_that_do_not_fit_into_one_run_are_scored_in_several(bundle: Bundle):
    payloads, model = Payloads.draw(bundle, 1500, 0), PeerModel(bundle.path, "cpu")
    for scores, expected in zip(model.scores(payloads.blocks), payloads.scores, strict=True):
        assert np.abs(scores - expected).max() <= 1e-5
    assert model.engine.batch_sizes.nonzero()[0].tolist() == [3000]
    model.engine.close()


def test_a_peer_that_is_not_installed_says_what_is_missing(tmp_path: Path):
    peer = PEERS["mosec"]
    (tmp_path / "python").write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'mosec'\" >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o700)
    python = python_of(peer, f"/usual,mosec={tmp_path / 'python'}")
    assert missing(peer, python) == "ModuleNotFoundError: No module named 'mosec'"
    assert python_of(PEERS["litserve"], "/usual,mosec=/other") == "/usual"
    assert python_of(PEERS["uvicorn"], "/usual") != "/usual"


@pytest.mark.parametrize(("system", "topology"), [("dpiframe", "colocated"), ("dpiframe-fanin", "fanin")])
def test_our_configurations_are_ones_that_the_service_takes(tmp_path: Path, system: str, topology: str):
    config = parse_config(our_config(system, tmp_path, "cpu", 3, 5), "suite")
    assert (config.topology, config.replicas, config.device, config.models[0].name) == (topology, 3, "cpu", "demo")
    assert topology == "colocated" or config.ingress_replicas == 15
    plan = Plan(tmp_path, "cpu", topology, 4, 2, 100, (0.0,), 0.3, 1, 9, 1, 0)
    scaled = parse_config(plan.config, "suite")
    assert (scaled.topology, scaled.first_replicas, scaled.max_replicas) == (topology, 1, 4)


def served(
    system: str, rate: float, *, p99_ms: float = 5.0, batch: int = 100, form: str = "binary", gpus: int = 1, **more: object
):
    cell = {"form": form, "gpus": gpus, "connections": 16, "rate": 0} | more
    times = Times(1000.0, p99_ms * 1e3, 10)
    return record("serving", system, model="demo", batch=batch, cell=cell, times=times, rows_per_s=rate * batch,
                  requests_per_s=rate, failed={}, load_limited=False)  # fmt: skip


def verdicts(aims, *records):
    results = Results({}, tuple({"file": "f", **r} for r in records))
    return {aim.what: aim.judge(results) for aim in aims}


def test_aims_on_the_cpu_are_judged_by_the_best_closed_loop_rates():
    found = verdicts(
        SERVING_CPU_AIMS,
        served("dpiframe", 2000), served("dpiframe", 1000, connections=1), served("dpiframe", 300, form="rows"),
        served("ray-serve", 190, form="rows"), served("mosec", 5000), served("uvicorn", 3000),
        served("litserve", 290, form="rows"),
    )  # fmt: skip
    assert next(v for k, v in found.items() if "other servers" in k).met is True  # 300 / 290 and 300 / 190
    stock = next(v for k, v in found.items() if "stock Ray" in k)
    assert (stock.met, stock.figure.split(" (")[0]) == (True, "binary 10.5x")
    bare = next(v for k, v in found.items() if "bare" in k)
    assert bare.met is False  # 0.4 of mosec
    assert next(v for k, v in found.items() if "lone client" in k).met is None


def test_aims_on_gpus_need_the_latency_too_and_count_gpus():
    found = verdicts(
        SERVING_GPU_AIMS,
        served("dpiframe-fanin", 30_000, p99_ms=12), served("dpiframe-fanin", 24_000), served("dpiframe", 5_100, batch=1000),
        served("dpiframe-fanin", 33_000) | {"file": "two"}, served("dpiframe-fanin", 50_000, gpus=2) | {"file": "two"},
        served("dpiframe-fanin", 30_000) | {"file": "four"}, served("dpiframe-fanin", 100_000, gpus=4) | {"file": "four"},
    )  # fmt: skip
    assert [verdict.met for verdict in found.values()][:2] == [False, True]
    assert "24000 requests/s" in next(iter(found.values())).figure  # not the 33,000 of a host of two
    scaling = [verdict for what, verdict in found.items() if "over one" in what]
    assert [(v.met, v.figure.split()[0]) for v in scaling[:2]] == [(False, "1.52x"), (False, "3.33x")]
    assert [v.met for v in scaling[2:]] == [None, None]


def test_scaling_is_judged_by_model_beside_what_the_cores_give():
    loops = [record("serving", "python-loops", cell={"form": None, "gpus": n}, turns_per_s=t) for n, t in ((1, 10), (2, 15))]
    wide = [served("dpiframe-fanin", rate, gpus=n, batch=1000) | {"model": WIDE} for n, rate in ((1, 100), (2, 190))]
    found = verdicts(SERVING_GPU_AIMS, *loops, *wide, served("dpiframe-fanin", 1000), served("dpiframe-fanin", 1400, gpus=2))
    scaling = [verdict for what, verdict in found.items() if "two GPUs" in what]
    assert [v.met for v in scaling] == [False, True]
    assert scaling[0].figure == "1.40x (1400 to 1000 requests/s; loops of Python on these cores: 1.50x)"


def test_a_gpus_share_of_the_cores_is_all_that_a_benchmark_and_its_servers_have():
    before = os.sched_getaffinity(0)
    with on_cores(1):
        assert usable_cores() == len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ValueError, match=f"cores: got 9999, expected at most {len(before)}"), on_cores(9999):
        pass


def test_the_report_says_what_was_not_measured_and_where_the_generator_was_the_limit():
    limited = served("dpiframe", 100) | {"load_limited": True, "failed": {"429": 3}}
    skipped = record("serving", "triton", cell={"form": "rows"}, skipped="no JSON")
    results = Results({}, tuple({"file": "f", **r} for r in (limited, skipped)))
    text = "\n".join(serving_table(results))
    assert "100* | 0.010 | 3 x 429" in text
    assert "Not measured: triton rows: no JSON." in text


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS.keys())
def test_the_module_that_a_peers_command_runs_is_there(peer) -> None:
    command = peer.command("python", Path("bundle"), 8000, "cpu", "rows")
    assert find_spec(command[command.index("-m") + 1]) is not None
