"""The client's candidates in every form that callers have: the same tensors go over the wire as from columns."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deployments.client.client import Client
from deployments.client.columns import raw_tensors
from deployments.client.frames import columns_of
from tests.deployments.live_app import LiveApp
from tests.deployments.serving_doubles import FakeEngine

COLUMNS: dict[str, list[Any]] = {
    "item": [1, None, 3],
    "site": ["a", "b", None],
    "tags": [["x"], None, ["y", "z"]],
    "price": [0.5, None, 2.0],
    "bias": [0.25, 0.5, 0.0],
}
ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveApp]:
    with LiveApp(FakeEngine()) as app:
        yield app


def pandas_frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(COLUMNS, index=[7, 3, 3])


def sent(candidates: Any) -> list[tuple[Any, ...]]:
    tensors, rows = raw_tensors(columns_of(candidates), None)
    return [(rows, t.name, t.datatype, t.shape, bytes(t.data)) for t in tensors]


def test_rows_and_tables_of_arrow_are_sent_as_columns_are() -> None:
    table = pa.table(COLUMNS)
    for form in (ROWS, tuple(ROWS), table, table.to_batches()[0], pa.concat_tables([table[:1], table[1:]])):
        assert sent(form) == sent(COLUMNS)


def test_a_frame_of_pandas_is_sent_as_columns_are_whatever_its_index_and_its_kind_of_null() -> None:
    made = pandas_frame()
    assert made["item"].dtype == "float64", "as pandas has integers with gaps"
    assert sent(made) == sent(COLUMNS)
    assert sent(made.assign(item=made["item"].astype("Int64"))) == sent(COLUMNS)
    assert sent(made.assign(price=made["price"].astype(object))) == sent(COLUMNS)
    for kind in ("category", "string", object):
        assert sent(made.assign(site=made["site"].astype(kind))) == sent(COLUMNS)
    assert sent(made.assign(bias=made["bias"].astype("float32"))[["bias"]]) == sent({"bias": np.float32([0.25, 0.5, 0.0])})
    assert sent(made[["item"]].iloc[[0, 2]].astype("int64")) == sent({"item": np.array([1, 3])})


def test_floats_of_pandas_are_sent_as_integers_where_each_stands_for_one_whether_some_are_missing_or_not() -> None:
    pandas = pytest.importorskip("pandas")
    for given, wanted in (
        ([1.0, 2.0], [1, 2]),
        ([1.0, None], [1, None]),
        ([2.0**53 - 1, None], [2**53 - 1, None]),
        ([2.0**53, 1.0], np.array([2.0**53, 1.0])),
        ([2.0**53, None], [2.0**53, None]),
        ([-(2.0**53), None], [-(2.0**53), None]),
        ([1e300, None], [1e300, None]),
        (np.float32([2.0**24, 1]), np.float32([2.0**24, 1])),
        (np.float32([2.0**24 - 1, 1]), [2**24 - 1, 1]),
        ([float("inf"), 1.0], np.array([float("inf"), 1.0])),
    ):
        assert sent(pandas.DataFrame({"item": given})) == sent({"item": wanted})


def test_a_frame_of_polars_is_sent_as_columns_are() -> None:
    polars = pytest.importorskip("polars")
    made = polars.DataFrame(COLUMNS)
    for form in (made, polars.concat([made[:1], made[1:]], rechunk=False)):
        assert sent(form) == sent(COLUMNS)
    assert sent(made.with_columns(polars.col("site").cast(polars.Categorical))) == sent(COLUMNS)


def test_a_service_scores_every_form_alike(live: LiveApp) -> None:
    forms = [COLUMNS, ROWS, pa.table(COLUMNS), pandas_frame()]
    wanted = np.float32([[0.251], [0.5], [0.003]])
    with Client(live.url, "fake") as client:
        for form in forms:
            assert np.allclose(client.score(form, {"user": 1}), wanted, atol=1e-7)
        for scores in client.score_together([(form, {"user": i}) for i, form in enumerate(forms)]):
            assert np.allclose(scores, wanted, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pa.table([[1], [2]], names=["a", "a"]), "candidates: got the column 'a', expected names of features, each"),
        (lambda: pandas_frame().rename(columns={"site": 5}), "candidates: got the column 5, expected names of features"),
        (lambda: pandas_frame().rename(columns={"site": "item"}), "candidates: got the column 'item', expected"),
        (lambda: "item", "candidates: got str, expected columns by feature, a list of dicts, or a table of pandas, polars or"),
    ],
)  # fmt: skip
def test_what_is_no_table_of_features_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        columns_of(make())
