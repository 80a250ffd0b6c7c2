"""Suite `latency` with a process a model: which cells a job has, whose turn the GPU is, and the records left."""

import json
import threading
import time
from collections import Counter

import pytest

from benchmarks.apart.gpu_turn import GpuTurn
from benchmarks.apart.latency_apart import jobs, peers_in, run, seen
from benchmarks.apart.latency_job import Job, JobRun
from benchmarks.systems.names import BATCHES, CONTEXTS, MODEL_TITLES, cells_of
from tests.benchmarks.tiny import _TINY, unexpected


def todo(models=tuple(MODEL_TITLES), batches=BATCHES):
    return jobs(models, ("bf16", "tf32"), batches, CONTEXTS, seconds=0.01, seed=0, search_until=0.0)


def turn(path):
    return GpuTurn(path, lambda: None)


def test_every_cell_is_in_one_job_and_those_that_say_most_come_first():
    found = todo()
    cells = Counter((job.model, *at) for job in found for at in job.cells)
    assert set(cells.values()) == {1}
    for model in MODEL_TITLES:
        assert sum(m == model for m, *_ in cells) == 2 * cells_of(model)
    assert all(job.cells[:2] == (("bf16", 1024, c), ("tf32", 1024, c)) for job in found for c in {job.cells[0][2]})


def test_of_a_folder_of_results_cells_that_were_searched_are_left_out_and_those_without_a_peer_begin(tmp_path):
    peers = [("compile-mapped", 64, {}), ("compile-captured", 256, {"products": "ATEN"}), ("eager", 1, {})]
    run = {"gpu": "NVIDIA H200", "date": "2026-11-24"}
    records = [
        {
            "suite": "latency",
            "system": system,
            "model": "dlrm",
            "batch": rows,
            "precision": "bf16",
            "cell": {},
            "p50_us": 9.0,
            **more,
        }
        for system, rows, more in peers
    ]
    (tmp_path / "latency-bf16.json").write_text(json.dumps({"run": run, "records": records[:1], "other_cells": [
        {"run": run, "records": records[1:]}
    ]}))  # fmt: skip
    known = peers_in(tmp_path)
    assert known == {("dlrm", ("bf16", 64, 1)): True, ("dlrm", ("bf16", 256, 1)): False}
    (job,) = jobs(["dlrm"], ["bf16"], [1, 64, 256], [1], seconds=0.01, seed=0, search_until=0.0, peers=known)
    assert job.cells == (("bf16", 256, 1), ("bf16", 1, 1))
    assert [at for at in job.cells if at in job.known] == [("bf16", 256, 1)]


def test_jobs_are_spread_over_the_gpus_of_a_host_and_each_process_sees_its_own(monkeypatch):
    models = ["deepfm", "dcn", "dcnv2"]
    made = [jobs(models, ["bf16"], [1], [1], seconds=0.01, seed=0, search_until=0.0, gpus=n) for n in (1, 2)]
    assert [[job.gpu for job in each] for each in made] == [[None] * 3, [0, 1, 0]]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (seen(None), seen(1)) == ({}, {"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert (seen(None), seen(1)) == ({}, {"CUDA_VISIBLE_DEVICES": "5"})


def test_a_turn_is_of_one_at_a_time_and_may_be_entered_again(tmp_path):
    mine, other = turn(tmp_path / "gpu"), turn(tmp_path / "gpu")
    entered = []

    def wait_and_enter():
        with other:
            entered.append(1)

    thread = threading.Thread(target=wait_and_enter)
    with mine:
        with mine:
            thread.start()
        thread.join(0.1)
        assert entered == []
    thread.join(60)
    assert entered == [1]
    assert other.waited_s > 0


def test_who_leaves_a_turn_has_waited_for_its_launches(tmp_path):
    waited = []
    mine = GpuTurn(tmp_path / "gpu", lambda: waited.append(1))
    with mine, mine:
        assert waited == []
    assert waited == [1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_a_job_times_ours_beside_its_peers_and_says_what_they_chose_from(tmp_path):
    cells = (("fp32", 8, 1), ("bf16", 8, 1))
    job = Job("dlrm", cells, 0.01, 0, search_until=0.0, device="cpu", size=_TINY["dlrm"])
    held = JobRun(job, turn(tmp_path / "gpu"), unexpected)
    held.prepare()
    records = list(held.measure(turn(tmp_path / "timed")))
    assert [(r["system"], r["precision"]) for r in records] == [
        (system, precision) for precision, *_ in cells for system in ("dpiframe", "eager", "compile-captured")
    ]
    assert [r.get("products") for r in records] == [None, None, "ATEN"] * 2
    assert all(r["calls"] >= 20 and r["cell"] == {"ids": "zipf", "buckets": "exact"} for r in records)


def test_a_job_may_time_ours_beside_eager_alone(tmp_path):
    job = Job(
        "dlrm", (("fp32", 8, 1), ("bf16", 1, 1)), 0.01, 0, search_until=0.0, compiled=False, device="cpu", size=_TINY["dlrm"]
    )
    held = JobRun(job, turn(tmp_path / "gpu"), unexpected)
    held.prepare()
    found = [(r["system"], r["precision"], r["batch"]) for r in held.measure(turn(tmp_path / "timed"))]
    assert found == [(system, *cell) for cell in (("fp32", 8), ("bf16", 1)) for system in ("dpiframe", "eager")]


@pytest.mark.timeout(120)
def test_a_job_that_is_not_done_in_time_is_ended_and_named():
    job = Job("dlrm", (("fp32", 8, 1),), 0.01, 0, search_until=0.0, device="cpu", size=_TINY["dlrm"])
    failed, now = [], time.time()
    assert list(run([job], lambda what, error: failed.append(what), timed_from=now, end=now + 0.5)) == []
    assert failed == [job.name]


@pytest.mark.timeout(120)
def test_a_job_that_is_late_leaves_out_the_cells_that_have_no_peers_and_is_done():
    job = Job("dlrm", (("fp32", 8, 1),), 0.01, 0, search_until=0.0, prepare_until=0.0, device="cpu", size=_TINY["dlrm"])
    failed, now = [], time.time()
    assert list(run([job], lambda what, error: failed.append(what), timed_from=now, end=now + 110)) == []
    assert failed == []
