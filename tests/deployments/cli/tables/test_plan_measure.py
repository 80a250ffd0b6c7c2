"""A plan's lookup is run where its rows lie, over rows that read as it was planned for."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from deployments.cli.tables import plan_measure
from deployments.cli.tables.plan_command import write_plan
from deployments.cli.tables.plan_measure import batches_of, drawn_block, measured
from dpiframe_core.embedding.placement import Links
from dpiframe_core.embedding.row_counts import RowCounts, count_rows, zipf_counts
from dpiframe_core.errors import InputError
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import DeepFM
from tests import oracle
from tests.runner import small_bundle

GIB = 1 << 30
ARCHITECTURE = DeepFM(hidden_units=(4,))


def planned(path: Path, trace: Path | None = None, gpus: int = 1, host_bytes: int | None = None, **kinds: Any) -> Any:
    kinds = {"dim": 8, "one_hot": 60, "context": 0, "bags": 0, "embedded_numbers": 0} | kinds
    made = small_bundle(path, ARCHITECTURE, **kinds)
    host = None if host_bytes is None else host_bytes / GIB
    return made, write_plan(made.path, gpus, 20_000 / GIB, trace, 1.05, Links(), None, host)


@pytest.mark.parametrize("host_bytes", [None, 180_000])
def test_a_cpu_reads_every_row_of_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_bytes: int | None) -> None:
    made, plan = planned(tmp_path / "b", host_bytes=host_bytes)
    asked: list[tuple[Any, ...]] = []

    def timed(graph: Any, schema: FeatureSchema, store: Any, blocks: list[RowBlock]) -> float:
        asked.append((graph, store.ahead is not None, [b.rows for b in blocks]))
        found: float = TIMED(graph, schema, store, blocks)
        return found

    TIMED = plan_measure.lookup_us
    monkeypatch.setattr(plan_measure, "lookup_us", timed)
    said = measured(plan, made.path, None, 50, "cpu")
    ((graph, reads_ahead, rows),) = asked
    assert rows == [50] * 32
    assert any(n.op == "lookup" for n in graph.nodes)
    assert reads_ahead == (host_bytes is not None)
    us = re.fullmatch(r"measured on cpu: ([\d,.]+) us; it reads rows where .* the prediction is of a GPU", said)
    assert us is not None
    assert float(us[1].replace(",", "")) > 0


def test_rows_of_a_trace_come_in_batches_and_again_if_they_are_few(tmp_path: Path) -> None:
    schema = oracle.make_schema()
    rng = np.random.default_rng(0)
    blocks = [oracle.make_block(schema, n, 3, rng) for n in (5, 9, 4)]
    whole = count_rows(schema, blocks)
    parts = list(batches_of(iter(blocks), 6))
    assert [b.rows for b in parts] == [6, 6, 6]
    again = count_rows(schema, parts)
    assert all((again.tables[name] == own).all() for name, own in whole.tables.items())
    (many,) = batches_of(iter(blocks), 40)
    assert many.rows == 40
    assert (many.candidate_ids[:18] == many.candidate_ids[18:36]).all()


def test_drawn_rows_read_as_the_counts_say() -> None:
    schema = oracle.make_schema(context=0, bags=1)
    counts = zipf_counts(schema, 1.2)
    block = drawn_block(schema, counts, 4000, 0)
    found = count_rows(schema, [block])
    for name, own in counts.tables.items():
        np.testing.assert_allclose(found.tables[name] / found.tables[name].sum(), own / own.sum(), atol=0.03)
    few = RowCounts({name: np.eye(len(own), dtype=np.int64)[-1] for name, own in counts.tables.items()}, 1)
    assert (drawn_block(schema, few, 3, 0).column(schema.columns["c4"]) == schema.table("c4").rows - 1).all()


def test_a_trace_is_measured_by_its_own_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c0": [2, 1], "c1": [9, 8], "bag0": [["a"], []]}), tmp_path / "rows.parquet")
    made, plan = planned(tmp_path / "b", tmp_path / "rows.parquet", one_hot=2, context=1, bags=1)
    assert measured(plan, made.path, tmp_path / "rows.parquet", 3, "cpu").startswith("measured on cpu: ")


def test_a_plan_for_several_gpus_is_not_measured_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan = planned(tmp_path / "b", gpus=2)
    monkeypatch.setattr(plan_measure, "target_device", lambda _: torch.device("cuda:0"))
    with pytest.raises(InputError, match="--measure: got 'a plan for 2 GPUs', expected one for a single GPU"):
        measured(plan, made.path, None, 50, "cuda")


@pytest.mark.gpu
def test_a_gpu_is_measured_beside_the_prediction(tmp_path: Path) -> None:
    made, plan = planned(tmp_path / "b")
    said = measured(plan, made.path, None, 50, "cuda")
    us = re.fullmatch(r"measured on cuda:0: ([\d,.]+) us, launch and latency included; [\d.]+ times the predicted", said)
    assert us is not None
    assert 0 < float(us[1]) < 1000
