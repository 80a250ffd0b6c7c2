"""The store takes the tables that the schema names and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from dpiframe_core.embedding import spares
from dpiframe_core.embedding import store as store_file
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.errors import BundleError
from dpiframe_core.far_rows.row_source import FileRows
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table

SCHEMA = FeatureSchema(
    features=(Categorical(name="a", values="int", encoder=Identity(), table="a", first_order_table="w"),),
    tables=(Table(name="a", rows=5, dim=3, dtype="int8"), Table(name="w", rows=5, dim=1)),
)
TABLES = {"a": torch.ones(5, 3, dtype=torch.int8), "w": torch.ones(5, 1)}
SCALES = {"a": torch.ones(3)}
CPU = torch.device("cpu")


def test_tables_and_scales_are_kept_in_the_schemas_order():
    store = EmbeddingStore(SCHEMA, dict(reversed(TABLES.items())), CPU, SCALES)
    assert [t.dtype for t in store.tables] == [torch.int8, torch.float32]
    assert torch.equal(store.scales[0], SCALES["a"])
    assert store.scales[1] is None
    assert store.bytes_used == 5 * 3 + 3 * 4 + 5 * 4 == sum(t.bytes_used for t in SCHEMA.tables)


@pytest.mark.parametrize(
    ("tables", "scales", "message"),
    [
        ({"a": TABLES["a"]}, SCALES, r"tables\.w: got None, expected \(5, 1\) of float32"),
        (TABLES | {"a": torch.ones(5, 3)}, SCALES, r"tables\.a: got \(\(5, 3\), 'torch\.float32'\), expected \(5, 3\) of int8"),
        (TABLES, None, r"tables\.a\.scale: got None, expected \(3,\) of float32"),
        (TABLES, {"a": torch.ones(1, 3)}, r"tables\.a\.scale: got \(\(1, 3\), 'torch\.float32'\), expected \(3,\) of float32"),
    ],
)
def test_a_table_that_differs_from_the_schema_is_refused(tables, scales, message):
    with pytest.raises(BundleError, match=message):
        EmbeddingStore(SCHEMA, tables, CPU, scales)


def test_files_are_read_row_by_row_only_once_all_other_rows_are_where_they_belong(monkeypatch):
    events = []
    monkeypatch.setattr(spares, "DeviceReadable", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(
        store_file, "Tiers", lambda *_: events.append("held") or SimpleNamespace(descriptors=None, host_bytes=0)
    )
    monkeypatch.setattr(FileRows, "advise", lambda _, table: events.append(table))
    places = tuple(TablePlacement(t.name, t.rows, 1, 1, 3) for t in SCHEMA.tables)
    EmbeddingStore(SCHEMA, TABLES, torch.device("cuda"), SCALES, Home(Placement(1, places), "small", None)).ahead.close()
    assert events == ["held", 0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_gpu_has_a_large_tables_rows_as_they_were(dtype):
    rows = (3 << 24) // 24 + 1  # of 24 to 96 bytes: several parts, the last one short
    table = torch.arange(rows * 24, dtype=torch.int32).remainder(1009).sub(500).to(getattr(torch, dtype)).view(rows, 24)
    features = (Categorical(name="a", values="int", encoder=Identity(), table="a"),)
    schema = FeatureSchema(features=features, tables=(Table(name="a", rows=rows, dim=24, dtype=dtype),))
    store = EmbeddingStore(schema, {"a": table}, torch.device("cuda"), {"a": torch.ones(24)})
    assert store.tables[0].is_cuda
    assert torch.equal(store.tables[0].cpu(), table)
