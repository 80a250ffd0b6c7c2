"""Pruned models against the unpruned one, row by row: kept ids read what they read, dropped ones the row for unknown values."""

from collections import Counter

import numpy as np
import pytest
import torch

from dpiframe_core.embedding.prune import check_prunable, id_spaces, most_read, prune
from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table, Vocabulary
from dpiframe_core.features.transforms import Bucketize
from dpiframe_core.features.vocabulary import VocabularyTable
from tests import oracle
from tests.dpiframe_core.embedding.vocabulary_model import ITEMS, SHOPS, USERS, make_rows, make_schema, make_vocabularies

SPECIAL = {"user": {0, 1}, "item": {0, 1}, "shop": {3, SHOPS - 1}}


@pytest.fixture(scope="module")
def model():
    schema = make_schema()
    tables = oracle.make_tables(schema, np.random.default_rng(5))
    return schema, make_vocabularies(), {k: torch.from_numpy(v) for k, v in tables.items()}


def space_of(schema, table):
    (space,) = (s for s in id_spaces(schema) if table in s.names)
    return space


def counted(schema, vocabularies, rows):
    block = Encoder(schema, vocabularies).encode(rows)
    out = {}
    for name in SPECIAL:
        space = space_of(schema, name)
        out[name] = np.zeros(space.rows, np.int64)
        space.count(block, schema, out[name])
    return out


def pruned(model, share, rows=None, block=None):
    schema, vocabularies, tables = model
    counts = counted(schema, vocabularies, rows or make_rows(300, 1))
    kept = {t: most_read(space_of(schema, t), share, vocabularies, counts[t]) for t in SPECIAL}
    block = block or oracle.make_block(schema, 30, 6, np.random.default_rng(2))
    return kept, prune(schema, list(kept.values()), vocabularies, tables, block)


def reads(schema, tables, block, feature, table):
    """float32[n or q, width, dim]: the table's row of each id of a block, NaN where a list has ended."""
    raw = block.column(schema.columns[feature])
    ids = np.where(raw == np.array(-1).astype(raw.dtype), -1, raw.astype(np.int64))
    return np.where(ids[..., None] < 0, np.nan, tables[table].numpy()[ids])


def test_tables_of_one_feature_and_of_one_vocabulary_are_one_space():
    spaces = {tuple(sorted(s.names)): [f.name for f in s.features] for s in id_spaces(make_schema())}
    assert spaces == {
        ("user", "user_w"): ["user"], ("item", "item_w"): ["item", "seen"], ("shop", "shop_w"): ["shop"],
        ("rank", "rank_w"): ["rank"],
    }  # fmt: skip
    apart = [
        Categorical(name=n, encoder=Vocabulary(file=file), table=t, missing_id=0, oov_id=1)
        for n, file, t in (("a", "x", "ta"), ("b", "y", "tb"), ("c", "y", "ta"), ("d", "z", "td"))
    ]
    tables = tuple(Table(name=t, rows=n, dim=2) for t, n in (("ta", 9), ("tb", 7), ("td", 5)))
    spaces = id_spaces(FeatureSchema(features=tuple(apart), tables=tables))
    assert [(s.names, s.rows) for s in spaces] == [({"ta", "tb"}, 9), ({"td"}, 5)]


def test_ids_are_counted_as_often_as_rows_read_them(model):
    schema, vocabularies, _ = model
    rows = make_rows(200, 8)
    got = counted(schema, vocabularies, rows)
    words = {f"i{n}": n for n in range(2, ITEMS)}
    items = Counter(0 if v is None else words.get(v, 1) for v in rows["item"])
    items.update(words.get(v, 1) for bag in rows["seen"] for v in bag)
    users = Counter(0 if v is None else v - 100 if 102 <= v < 100 + USERS else 1 for v in rows["user"])
    shops = Counter(3 if v is None else v if v < SHOPS else SHOPS - 1 for v in rows["shop"])
    for name, want in (("item", items), ("user", users), ("shop", shops)):
        assert got[name].tolist() == [want[i] for i in range(len(got[name]))], name


def test_a_context_of_many_rows_counts_for_each_of_them(model):
    schema, vocabularies, _ = model
    request = {"item": ["i5", "i6", "i7"], "shop": [1, 1, 2], "rank": [0.0, 0.0, 0.0]}
    block = Encoder(schema, vocabularies).encode(request, {"user": 104, "seen": ["i9", "i5"]})
    counts = np.zeros(ITEMS, np.int64)
    space_of(schema, "item").count(block, schema, counts)
    assert {i: int(n) for i, n in enumerate(counts) if n} == {5: 4, 6: 1, 7: 1, 9: 3}


@pytest.mark.parametrize("share", [0.2, 0.29, 0.5, 0.9999])
def test_the_rows_read_least_are_dropped_but_never_special_ones(model, share):
    schema, vocabularies, _ = model
    counts = counted(schema, vocabularies, make_rows(300, 1))
    kept, _ = pruned(model, share)
    for name, special in SPECIAL.items():
        n = schema.table(name).rows
        lowest = sorted(set(range(n)) - special, key=lambda i: (counts[name][i], -i))
        dropped = lowest[: int(round(share * n, 6))]
        assert kept[name].ids.tolist() == sorted(set(range(n)) - set(dropped)), name


def test_without_counts_the_last_ids_are_dropped(model):
    schema, vocabularies, _ = model
    kept = most_read(space_of(schema, "item"), 0.25, vocabularies)
    assert kept.ids.tolist() == list(range(225))
    kept = most_read(space_of(schema, "shop"), 0.2, vocabularies)
    assert kept.ids.tolist() == [*range(19), SHOPS - 1]


def test_the_row_of_a_padding_value_stays():
    lists = {"encoder": Vocabulary(), "max_values": 3, "missing_id": 0, "oov_id": 1}
    a = Categorical(name="a", table="ta", padding_value="pad", **lists)
    b = Categorical(name="b", table="tb", values="int", padding_value=7, **(lists | {"encoder": Identity()}))
    schema = FeatureSchema(features=(a, b), tables=(Table(name="ta", rows=10, dim=2), Table(name="tb", rows=9, dim=2)))
    words = {"a": VocabularyTable.of({"pad": 9} | {f"w{i}": i for i in range(2, 9)})}
    kept = [most_read(s, 0.5, words).ids.tolist() for s in id_spaces(schema)]
    assert kept == [[0, 1, 2, 3, 9], [0, 1, 2, 3, 7]]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9999])
def test_kept_values_read_their_rows_and_dropped_ones_the_row_for_unknown_ones(model, share):
    schema, vocabularies, tables = model
    rows = make_rows(300, 4)
    kept, p = pruned(model, share)
    old, new = Encoder(schema, vocabularies).encode(rows), Encoder(p.schema, p.vocabularies).encode(rows)
    for f in schema.features[:4]:
        own = kept[f.table]
        raw = old.column(schema.columns[f.name])
        ids = np.where(raw == np.array(-1).astype(raw.dtype), -1, raw.astype(np.int64))
        dropped = (ids >= 0) & ~np.isin(ids, own.ids)
        assert dropped.any()
        assert (ids >= 0).sum() > dropped.sum()
        for table in (f.table, f.first_order_table):
            want = reads(schema, tables, old, f.name, table)
            want[dropped] = tables[table][f.oov_id].numpy()
            np.testing.assert_array_equal(reads(p.schema, p.tables, new, f.name, table), want)
    np.testing.assert_array_equal(old.candidate_dense, new.candidate_dense)


def test_tables_have_the_kept_rows_and_bytes_fall(model):
    tables = model[2]
    kept, p = pruned(model, 0.5)
    for t in p.schema.tables:
        source = kept.get(t.name.removesuffix("_w"))
        assert p.tables[t.name].shape == (t.rows, t.dim)
        if source is None:
            assert p.tables[t.name] is tables[t.name]
        else:
            assert torch.equal(p.tables[t.name], tables[t.name][torch.from_numpy(source.ids)])
    assert [t.rows for t in p.schema.tables] == [20, 20, 150, 150, 13, 13, 1, 1]


def test_vocabularies_lose_the_values_of_dropped_ids_and_raw_ids_get_one(model):
    _, vocabularies, _ = model
    kept, p = pruned(model, 0.5)
    assert p.vocabularies.keys() == {"items", "user", "shop"}
    for name, table in (("items", "item"), ("user", "user")):
        old = dict(zip(*(vocabularies[name].table[c].to_pylist() for c in ("value", "id")), strict=True))
        new = {i: rank for rank, i in enumerate(kept[table].ids.tolist())}
        got = dict(zip(*(p.vocabularies[name].table[c].to_pylist() for c in ("value", "id")), strict=True))
        assert got == {value: new[i] for value, i in old.items() if i in new}
    shops = p.vocabularies["shop"].table
    assert shops["value"].to_pylist() == kept["shop"].ids.tolist()
    assert shops["id"].to_pylist() == list(range(13))
    shop = p.schema.feature("shop")
    assert (shop.encoder, shop.values, shop.oov_id) == (Vocabulary(), "int", 12)
    assert kept["shop"].ids[shop.missing_id] == 3
    assert p.schema.feature("seen").missing_id == -1


def test_encoded_rows_are_renumbered_with_their_contexts_and_padding(model):
    schema, _, tables = model
    block = oracle.make_block(schema, 30, 6, np.random.default_rng(2))
    kept, p = pruned(model, 0.5, block=block)
    assert p.block.layout == p.schema.block_layout != schema.block_layout, "half of the items' ids fit into one byte"
    np.testing.assert_array_equal(p.block.request_of_row, block.request_of_row)
    for f in schema.features[:4]:
        raw = block.column(schema.columns[f.name])
        ids = np.where(raw == np.array(-1).astype(raw.dtype), -1, raw.astype(np.int64))
        want = reads(schema, tables, block, f.name, f.table)
        want[(ids >= 0) & ~np.isin(ids, kept[f.table].ids)] = tables[f.table][f.oov_id].numpy()
        np.testing.assert_array_equal(reads(p.schema, p.tables, p.block, f.name, f.table), want)
    np.testing.assert_array_equal(p.block.candidate_dense, block.candidate_dense)
    assert isinstance(p.block, RowBlock)


def test_tables_of_fewer_rows_lose_the_rows_that_they_have():
    """Two features share a vocabulary; the table of one ends before the other's."""
    features = tuple(
        Categorical(name=n, encoder=Vocabulary(file="v"), table=f"t{n}", missing_id=0, oov_id=1) for n in ("a", "b")
    )
    schema = FeatureSchema(features=features, tables=(Table(name="ta", rows=10, dim=2), Table(name="tb", rows=8, dim=2)))
    words = {"v": VocabularyTable.of({f"w{i}": i for i in range(2, 8)})}
    counts = np.array([0, 0, 9, 0, 9, 0, 9, 9, 9, 0])
    (space,) = id_spaces(schema)
    kept = most_read(space, 0.3, words, counts)
    assert kept.ids.tolist() == [0, 1, 2, 4, 6, 7, 8]
    tables = {t.name: torch.arange(t.rows * 2.0).reshape(-1, 2) for t in schema.tables}
    p = prune(schema, [kept], words, tables, RowBlock.allocate(schema.block_layout, 1))
    assert [t.rows for t in p.schema.tables] == [7, 6]
    assert p.tables["tb"][:, 0].tolist() == [0, 2, 4, 8, 12, 14]
    assert p.vocabularies["v"].table["id"].to_pylist() == [2, 3, 4, 5]


def test_what_cannot_be_renumbered_is_refused_with_the_reason():
    common = {"table": "t", "missing_id": 0}
    cases = [
        (Categorical(name="f", encoder=Hash(buckets=8, first_id=2), oov_id=1, **common),
         "features.f.encoder: got 'hash', expected a vocabulary or raw ids: hashed ids cannot be renumbered"),
        (Categorical(name="f", encoder=Identity(), values="int", oov_id=1, **common),
         "features.f.encoder: got 'identity', expected a vocabulary, or a trace: raw ids have no known order"),
        (Categorical(name="f", encoder=Vocabulary(), **common),
         "features.f.oov_id: got null, expected a row for values unknown, which dropped ids can read"),
        (Numeric(name="f", transforms=(Bucketize(boundaries=tuple(map(float, range(9)))),), **common),
         "features.f.transforms: got 'bucketize', expected a vocabulary or raw ids: buckets cannot be dropped"),
    ]  # fmt: skip
    for feature, message in cases:
        (space,) = id_spaces(FeatureSchema(features=(feature,), tables=(Table(name="t", rows=10, dim=2),)))
        with pytest.raises(InputError) as error:
            check_prunable(space, counted=False)
        assert str(error.value) == message
        if isinstance(feature, Categorical) and isinstance(feature.encoder, Identity):
            check_prunable(space, counted=True)


def test_a_vocabulary_of_raw_ids_never_takes_the_place_of_another():
    a = Categorical(name="a", encoder=Identity(), values="int", table="ta", missing_id=0, oov_id=1)
    b = Categorical(name="b", encoder=Vocabulary(file="a"), table="tb", missing_id=0, oov_id=1)
    schema = FeatureSchema(features=(a, b), tables=(Table(name="ta", rows=10, dim=2), Table(name="tb", rows=8, dim=2)))
    words = {"a": VocabularyTable.of({"x": 2})}
    kept = most_read(id_spaces(schema)[0], 0.3, words)
    tables = {t.name: torch.zeros(t.rows, t.dim) for t in schema.tables}
    with pytest.raises(InputError, match=r"features\.a\.name: got 'a', expected another one than the vocab"):
        prune(schema, [kept], words, tables, RowBlock.allocate(schema.block_layout, 1))


def test_raw_ids_beyond_a_smaller_table_get_no_place_in_the_vocabulary():
    f = Categorical(
        name="f", encoder=Identity(out_of_range="oov"), values="int", table="t", first_order_table="w", missing_id=0, oov_id=1
    )
    schema = FeatureSchema(features=(f,), tables=(Table(name="t", rows=10, dim=2), Table(name="w", rows=7, dim=1)))
    tables = {t.name: torch.arange(1.0 * t.rows * t.dim).reshape(t.rows, t.dim) for t in schema.tables}
    kept = most_read(id_spaces(schema)[0], 0.3, {}, np.array([0, 0, 5, 0, 5, 0, 5, 5, 5, 0]))
    p = prune(schema, [kept], {}, tables, RowBlock.allocate(schema.block_layout, 1))
    block = Encoder(p.schema, p.vocabularies).encode({"f": [2, 4, 6, 3, 7, 8, 9, 99, None]})
    np.testing.assert_array_equal(reads(p.schema, p.tables, block, "f", "w")[:, 0, 0], [2, 4, 6, 1, 1, 1, 1, 1, 0])
