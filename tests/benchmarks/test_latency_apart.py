"""Suite `latency` with a process a model: which cells a job has, whose turn the GPU is, and the records left."""

import time
from collections import Counter

import pytest

from benchmarks.apart.gpu_turn import GpuTurn
from benchmarks.apart.latency_apart import jobs, run
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
    assert all(job.cells[:2] == (("bf16", 1024, c), ("bf16", 256, c)) for job in found for c in {job.cells[0][2]})


def test_of_models_with_layers_in_common_one_searches_for_all():
    first = {job.name.replace(" bf16/tf32", "") for job in todo() if not job.plain_first}
    assert first == {f"{m} contexts=1" for m in ("wide_deep", *MODEL_TITLES) if not m.startswith(("dcn", "deepfm"))}


def test_a_turn_is_of_one_at_a_time_and_may_be_entered_again(tmp_path):
    mine, other = turn(tmp_path / "gpu"), turn(tmp_path / "gpu")
    with mine:
        with mine:
            assert not other.at_once()
        assert not other.at_once()
    assert other.at_once()
    assert not mine.at_once()
    other.__exit__(None, None, None)
    assert mine.at_once()


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
    records = list(held.measure())
    assert [(r["system"], r["precision"]) for r in records] == [
        (system, precision) for precision, *_ in cells for system in ("dpiframe", "eager", "compile-captured")
    ]
    assert [r.get("products") for r in records] == [None, None, "ATEN"] * 2
    assert all(r["calls"] >= 20 and r["cell"] == {"ids": "zipf", "buckets": "exact"} for r in records)


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
