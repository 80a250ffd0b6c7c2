"""The CPU lane computes few sizes of batches, and answers for the rows that it was given."""

import numpy as np
import pytest

from dpiframe_core.engine.cpu_lane import computed_rows
from dpiframe_core.graph.architecture import DCNv2
from tests import oracle
from tests.runner import Model, table_tensors


def test_few_sizes_are_computed_and_an_eighth_more_at_most():
    sizes = {rows: computed_rows(rows) for rows in range(1, 4097)}
    assert len(set(sizes.values())) == 80
    assert all(rows <= size <= rows * 9 / 8 for rows, size in sizes.items())
    assert all(computed_rows(size) == size for size in sizes.values())


@pytest.mark.parametrize("units", [8, 9000])  # of 9,000 units the layer is oneDNN's at all sizes
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 100, 257])
def test_a_rounded_batch_scores_its_own_rows_and_counts_only_their_ids(rows, units):
    rng = np.random.default_rng(rows)
    schema = oracle.make_schema(first_order=False, plain_numbers=2)
    tensors, tables = table_tensors(schema, oracle.make_tables(schema, rng))
    architecture = DCNv2(cross_layers=1, hidden_units=(units,))
    dense = oracle.make_dense(schema, architecture, 1, rng)
    model = Model(schema, architecture, dense, tensors, "cpu")
    block = oracle.make_block(schema, rows, 3, rng)
    result = model.lane.run([block])
    assert result.scores.shape == (rows, 1)
    few = model.operators.rows_in_any_number
    assert few >= 16 if units == 8 else few < 16
    assert result.bucket == (rows if rows <= few else computed_rows(rows))
    np.testing.assert_allclose(result.scores, oracle.scores(schema, architecture, dense, tables, block), rtol=0, atol=1e-5)
    assert model.operators.out_of_range == 0
