"""The log of scored rows: what was sent and what came of it, in files that `dpiframe score` scores the same."""

import asyncio
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deployments.batching.batcher import RowBatcher
from deployments.config import Limits
from deployments.config_observed import ScoreLog
from deployments.score_log import recorder
from deployments.score_log.log_folder import LogFolder
from deployments.score_log.recorder import ScoreRecorder
from deployments.scoring.catalog import Catalog
from deployments.scoring.job import Job
from deployments.scoring.served_model import ServedModel
from deployments.scoring.watchers import Watchers
from deployments.serve.http_app import build_app
from dpiframe_core.engine.engine import Engine
from tests.deployments.protocol.test_rest import listed
from tests.deployments.serving_doubles import FakeEngine, columns

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LIMITS = Limits(max_body_bytes=200_000, max_rows_per_request=500)


def posted(engine: Any, config: ScoreLog, *requests: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    """The answers of an app that writes its log, which is whole by then."""

    async def main() -> list[httpx.Response]:
        batcher = RowBatcher(engine.run_batch, max_batch_rows=engine.max_batch_rows, lanes=1, max_queued_rows=1000)
        models = {engine.manifest.name: ServedModel.of(engine, batcher, LIMITS)}
        log = ScoreRecorder(config)
        app = build_app(Catalog(models), LIMITS, watchers=Watchers(recorder=log))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            out = [await client.post(path, json=body) for path, body in requests]
        await batcher.close(5)
        log.close()
        return out

    return asyncio.run(main())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_dpiframe_score_of_the_logged_rows_gives_the_logged_scores(demo_bundle: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from deployments.cli.main import app

    engine = Engine.load(demo_bundle, device="cpu")
    engine.warmup()
    example = json.loads((demo_bundle / "example.json").read_text())
    as_rows = [dict(zip(example["candidates"], row, strict=True)) for row in zip(*example["candidates"].values(), strict=True)]
    requests = [("/v1/score", example), ("/v1/score", example | {"candidates": as_rows[1:3]})]
    first, second = posted(engine, ScoreLog(folder=str(tmp_path / "log"), sample=1), *requests)
    engine.close()
    (file,) = files(tmp_path / "log")
    logged = pq.read_table(file, partitioning=None)
    answered = first.json()["scores"] + second.json()["scores"]
    assert logged["@score"].to_pylist() == answered
    assert logged["@request_id"].to_pylist() == [first.json()["request_id"]] * 5 + [second.json()["request_id"]] * 2
    assert logged["@row"].to_pylist() == [0, 1, 2, 3, 4, 0, 1]
    assert {(m.as_py(), v.as_py()) for m, v in zip(logged["@model"], logged["@version"], strict=True)} == {("demo", "1")}
    age_s = time.time() - logged["@time"][0].as_py().timestamp()
    assert 0 <= age_s < 60
    for name, column in example["candidates"].items():
        assert logged[name].to_pylist() == column + column[1:3], name
    for name, value in example["context"].items():
        assert logged[name].to_pylist() == [value] * 7, name
    command = ["score", str(demo_bundle), str(file), "-o", str(tmp_path / "again.parquet"), "--device", "cpu"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    again = pq.read_table(tmp_path / "again.parquet", partitioning=None)
    assert np.abs(np.array(again["score"]) - np.array(again["@score"])).max() < 1e-6  # batches of another size


def test_both_protocols_and_lists_and_nulls_are_logged_as_they_were_sent(tmp_path: Path) -> None:
    given = {**columns(2), "tags": [["x", "y"], None], "price": [1, None], "site": [None, "b"]}
    requests = [
        ("/v1/score", {"context": {"user": 7}, "candidates": given}),
        ("/v2/models/fake/infer", listed()),
        ("/v1/score", {"candidates": {"item": ["no number"]}}),
    ]
    answers = posted(FakeEngine(tasks=("click", "buy")), ScoreLog(folder=str(tmp_path), sample=1), *requests)
    assert [a.status_code for a in answers] == [200, 200, 422]
    (file,) = files(tmp_path)
    logged = pq.read_table(file, partitioning=None).to_pylist()
    assert len(logged) == 2 + len(answers[1].json()["outputs"][0]["data"]) // 2
    for i, row in enumerate(logged[:2]):
        assert row["user"] == 7
        assert {name: row[name] for name in given} == {name: column[i] for name, column in given.items()}
        assert [row["@score_click"], row["@score_buy"]] == [answers[0].json()["scores"][task][i] for task in ("click", "buy")]
    sent = {part["name"]: part for part in listed()["inputs"]}
    assert [row["item"] for row in logged[2:]] == sent["item"]["data"]


def test_only_a_sample_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([0.5, 0.2, 0.25, 0.1])
    monkeypatch.setattr(recorder, "random", lambda: next(drawn))
    requests = [("/v1/score", {"context": {"user": 1}, "candidates": columns(1, i)}) for i in range(4)]
    posted(FakeEngine(), ScoreLog(folder=str(tmp_path), sample=0.25), *requests)
    (file,) = files(tmp_path)
    assert pq.read_table(file, partitioning=None)["item"].to_pylist() == [1, 3]


def rows(count: int, seed: int = 0) -> pa.Table:
    return pa.table({"x": np.random.default_rng(seed).random(count)})  # which does not compress


def test_all_files_together_stay_within_the_bound_and_the_oldest_go_first(tmp_path: Path) -> None:
    folder, other = LogFolder(str(tmp_path), 1), LogFolder(str(tmp_path), 1)  # two replicas
    mine = tmp_path / "notes.parquet"
    mine.write_bytes(b"x" * 2_000_000)  # not a file of the log
    written, sizes = [], []
    for i in range(8):
        written.append((folder, other)[i % 2].write("m", "1", rows(20_000, i)))
        os.utime(written[-1], (i, i))
        sizes.append(written[-1].stat().st_size)
    kept = [path for path in written if path.exists()]
    assert 2 <= len(kept) < 8
    assert kept == written[-len(kept) :]
    assert sum(sizes[-len(kept) :]) <= 1_000_000 < sum(sizes[-len(kept) - 1 :])
    assert mine.exists()
    with pytest.raises(OSError, match=r"score_log.max_mb: got 1, expected room for a file of"):
        folder.write("m", "1", rows(300_000))
    assert [path for path in files(tmp_path) if path != mine] == []  # no half of it is left


def test_a_file_that_a_dead_process_left_unfinished_goes_and_one_that_is_being_written_stays(tmp_path: Path) -> None:
    folder = LogFolder(str(tmp_path), 100)
    where = folder.write("m", "1", rows(1)).parent
    stale, fresh = where / ".a.parquet.part", where / ".b.parquet.part"
    for path in (stale, fresh):
        path.write_bytes(b"PAR1")
    os.utime(stale, (0, 0))
    folder.write("m", "1", rows(1))
    assert (stale.exists(), fresh.exists()) == (False, True)


@pytest.mark.parametrize("version", ["..", "a%2e", "1:2*?", "!" * 64])
def test_a_version_stays_inside_the_folder_and_the_files_are_this_users(tmp_path: Path, version: str) -> None:
    path = LogFolder(str(tmp_path / "log"), 1).write("m", version, rows(1)).resolve()
    assert path.is_relative_to(tmp_path / "log" / "model=m")
    assert len(path.relative_to(tmp_path).parts) == 4
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700


class Held:
    """A folder whose disk stalls until it is told to go on, or is full."""

    def __init__(self) -> None:
        self.go, self.full, self.written = threading.Event(), False, 0

    def write(self, model: str, version: str, table: pa.Table) -> None:
        assert self.go.wait(30)
        if self.full:
            raise OSError(28, "No space left on device")
        self.written += table.num_rows


def taken(log: ScoreRecorder, requests: int, n: int) -> None:
    engine = FakeEngine()
    served = ServedModel.of(engine, None, LIMITS)  # type: ignore[arg-type]
    for _ in range(requests):
        job = Job("r", 0.0)
        job.given = columns(n), {"user": 1}
        log.take(job, served, np.zeros((n, 1), np.float32))


def test_a_disk_that_stalls_costs_rows_and_no_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost: Counter[tuple[str, str]] = Counter()
    log = ScoreRecorder(ScoreLog(folder=str(tmp_path), sample=1, file_rows=1), lambda m, v, n: lost.update({(m, v): n}))
    held = Held()
    log._folder = held  # type: ignore[assignment]
    taken(log, 1, 500)
    while log._waiting:
        time.sleep(0.01)  # it writes now, and is held
    taken(log, 200, 500)  # returns, though nobody takes them
    assert log.dropped == 200 - 65_536 // 500
    assert lost == {("fake", "7"): log.dropped}
    held.go.set()
    log.close()
    assert held.written == 500 * (1 + 65_536 // 500)
    assert "69 sampled requests are not in the score log" in caplog.text


def test_a_full_disk_is_told_and_the_log_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost: list[tuple[str, str, int]] = []
    log = ScoreRecorder(ScoreLog(folder=str(tmp_path), sample=1, file_rows=1), lambda *of: lost.append(of))
    held = Held()
    log._folder, held.full = held, True  # type: ignore[assignment]
    held.go.set()
    for n in (1, 2, 3):
        taken(log, 1, 5)
        while log.dropped < n:
            time.sleep(0.01)
    held.full = False
    taken(log, 1, 7)
    log.close()
    assert held.written == 7
    assert lost == [("fake", "7", 1)] * 3
    (said,) = caplog.messages  # once a minute, however many files are lost
    assert said == "1 sampled requests are not in the score log: [Errno 28] No space left on device"


def test_a_file_is_written_when_it_is_due_and_not_at_each_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_TURN_S", 0.01)
    log = ScoreRecorder(ScoreLog(folder=str(tmp_path), sample=1, every_s=3600, file_rows=10))
    taken(log, 1, 5)
    while log._waiting:
        time.sleep(0.01)
    time.sleep(0.1)
    assert files(tmp_path) == []
    taken(log, 1, 5)  # the tenth row
    while not files(tmp_path):
        time.sleep(0.01)
    log._config = log._config.model_copy(update={"every_s": 1e-3})
    taken(log, 1, 3)
    while len(files(tmp_path)) < 2:
        time.sleep(0.01)
    log.close()
    assert sorted(pq.read_table(file, partitioning=None).num_rows for file in files(tmp_path)) == [3, 10]
