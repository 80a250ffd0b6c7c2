"""RecBole's DIN and DIEN, a state dict and a spec in, against the scores that the library's own classes gave."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import InputError
from dpiframe_core.importers.recbole.checkpoint import recbole
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.recbole.history_cases import BY_NAME, CASES, STEPS, TOKENS, rows, spec, vocabulary

STORED = Path(__file__).parent / "stored"


def files(case, folder):
    """The checkpoint, the spec beside its vocabularies, and the library's scores, float32[rows, 1]."""
    weights = load_file(STORED / f"{case.name}.safetensors")
    expected = weights.pop("expected").numpy()
    torch.save(weights, folder / "model.pt")
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec(case)))
    for name in TOKENS:
        (folder / f"{name}.json").write_text(json.dumps(vocabulary(name)))
    return folder / "model.pt", folder / "spec.yaml", expected


def scores(path, columns, device="cpu", precision="fp32"):
    """Of each row as a request of its own, float32[n, 1]: its history is context."""
    options = EngineOptions(policy="waves" if device != "cpu" else "auto", buckets=(64,), max_batch_rows=64, lanes=1)
    engine = Engine(read_bundle(path), device, precision, options)
    engine.warmup()
    try:
        lists = [name for name in columns if name.endswith("_list")]
        out = []
        for i in range(len(columns["item_id"])):
            context = {name: columns[name][i] for name in lists}
            one = {name: [v[i]] for name, v in columns.items() if name not in lists and name in engine.schema.columns}
            out.append(engine.score(one, context))
        return np.concatenate(out)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """case -> its bundle, not to be changed, and the library's scores: each is imported once for all tests."""

    @cache
    def import_once(name):
        folder = tmp_path_factory.mktemp(name)
        checkpoint, spec_file, expected = files(BY_NAME[name], folder)
        write_import(recbole(checkpoint, spec_file), folder / "bundle")
        return folder / "bundle", expected

    return lambda case: import_once(case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_raw_tokens_score_as_in_the_library(imported, case):
    bundle, expected = imported(case)
    assert expected.std() > 5e-3
    got = scores(bundle, rows(case))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), (None, 1e-3)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_raw_tokens_score_the_same_on_a_gpu(imported, case, precision, tolerance):
    bundle, expected = imported(case)
    got = scores(bundle, rows(case), "cuda:0", precision)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def scored(case, bundle, *more):
    """Of the first row, and of it with other raw values, by one engine."""
    columns = {name: [v[0]] * (1 + len(more)) for name, v in rows(case).items()}
    for i, change in enumerate(more, 1):
        for name, (value,) in change.items():
            columns[name][i] = value
    return scores(bundle, columns)[:, 0].tolist()


@pytest.mark.parametrize("name", ["din", "dien-gru", "dien-aigru", "dien-agru", "dien-augru"])
def test_steps_move_the_score_in_their_order_but_in_din_and_an_empty_history_has_a_score(imported, name):
    def history(*items):
        return {"item_id_list": [[f"item_id-{i}" for i in items]], "category_list": [["category-1"] * len(items)]}

    case, histories = BY_NAME[name], (history(3, 5, 7), history(7, 5, 3), history(3), history())
    _, long, turned, short, none = scored(case, imported(case)[0], *histories)
    assert len({long, short, none}) == 3
    assert 0 < none < 1
    assert abs(turned - long) < 1e-6 if name == "din" else abs(turned - long) > 1e-6


def test_an_item_that_the_data_set_did_not_have_reads_the_row_of_pad_and_is_a_step(imported):
    def history(*items):
        return {"item_id_list": [list(items)], "category_list": [["category-2"] * len(items)]}

    changes = {"item_id": ["unheard"]}, {"item_id": [None]}, history("unheard", "item_id-1"), history("item_id-1")
    first, unseen, missing, both, one = scored(BY_NAME["din"], imported(BY_NAME["din"])[0], *changes)
    assert unseen == missing != first
    assert abs(both - one) > 1e-4


def test_histories_are_of_their_items_and_din_has_no_features_of_users(tmp_path):
    checkpoint, spec_file, _ = files(BY_NAME["din"], tmp_path)
    found = {f.name: (f.table, f.max_values, f.scope, f.pooling) for f in recbole(checkpoint, spec_file).schema.features}
    assert found == {
        "item_id": ("item_id", 1, "candidate", "sum"), "category": ("category", 1, "candidate", "sum"),
        "item_id_list": ("item_id", STEPS, "context", "none"), "category_list": ("category", STEPS, "context", "none"),
    }  # fmt: skip


def test_a_user_gives_a_history_once_for_all_candidates(imported):
    case = BY_NAME["dien-augru"]
    bundle, expected = imported(case)
    columns = rows(case)
    context = {name: columns[name][7] for name in columns if name.endswith("_list")}
    several = {name: [v[7], v[2], v[7]] for name, v in columns.items() if name not in context}
    engine = Engine(read_bundle(bundle), "cpu", "fp32")
    engine.warmup()
    try:
        got = engine.score(several, context)
    finally:
        engine.close()
    assert got[0] == got[2] != got[1]
    assert got[0] == pytest.approx(expected[7], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("din", lambda s, w: s["features"].pop(0), r"token_embedding_table.item.*: got '15 rows', expected 10, 10 of item_id"),
        ("din", lambda s, w: [s["features"].pop(0) for _ in "ab"], r"features: got \[\], expected lists of one length, each w"),
        (
            "din",
            lambda s, w: s["features"][0].update(max_values=4),
            r"category_list of table category, 4 values.*of one length",
        ),
        ("din", lambda s, w: s["features"][0].update(table="no"), r"category_list of table no, 6 values.*of an item's token"),
        (
            "din",
            lambda s, w: [f.update(max_values=1) for f in s["features"][:2]],
            r"category_list of table category, 1 values.*of one len",
        ),
        (
            "din",
            lambda s, w: s["features"][0].update(vocabulary="gender.json", values="string"),
            r"list.vocabulary: got 'gender",
        ),
        (
            "din",
            lambda s, w: s["features"][2].update(max_values=3),
            r"item_id_list of table item_id.*of an item's token as table",
        ),
        (
            "dien-agru",
            lambda s, w: s["features"][0].update(table="age"),
            r"of table age, 6 values.*of an item's token as table",
        ),
        ("dien-agru", lambda s, w: s.update(settings={}), r"settings.gru_type: got 'nothing', expected the hyper-parameter"),
        ("dien-agru", lambda s, w: s.update(settings={"gru_type": "LSTM"}), r"gru_type: got 'LSTM', expected one of GRU, AI"),
        (
            "dien-agru",
            lambda s, w: s["features"].pop(-2),
            r"token_embedding_table.user.*: got '9 rows', expected 6, 6 of user_",
        ),
        (
            "dien-gru",
            lambda s, w: s["settings"].update(gru_type="AUGRU"),
            r"dynamic_rnn.rnn.weight_ih: got 'no such parameter'",
        ),
        ("dien-augru", lambda s, w: s["settings"].update(gru_type="AIGRU"), r"dynamic_rnn.weight_ih_l0: got 'no such paramet"),
        ("din", lambda s, w: w.update(more=torch.ones(2)), r"got '1 parameters left over', expected a place in RecBole's DIN"),
    ],
)
def test_what_does_not_fit_is_said_with_the_file_and_the_name(tmp_path, name, change, said):
    checkpoint, spec_file, _ = files(BY_NAME[name], tmp_path)
    fields, weights = yaml.safe_load(spec_file.read_text()), torch.load(checkpoint, weights_only=True)
    change(fields, weights)
    spec_file.write_text(yaml.safe_dump(fields))
    torch.save(weights, checkpoint)
    with pytest.raises(InputError, match=said):
        recbole(checkpoint, spec_file)
