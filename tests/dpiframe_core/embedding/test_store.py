"""The store takes the tables that the schema names and nothing else."""

import pytest
import torch

from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.errors import BundleError
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
