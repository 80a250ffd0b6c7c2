"""What does not fit together is refused with the names of what disagrees: files of other runs, layers, parameters, pickles."""

import collections
import io
import json
import os
import pickle
import re
import resource
import shutil
import types

import numpy as np
import pytest
import torch
import yaml

from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import BundleError, InputError
from dpiframe_core.importers.fuxictr.files import find_files
from dpiframe_core.importers.fuxictr.pickled_processor import _Dtype, _InertUnpickler, read_processor
from dpiframe_core.importers.fuxictr.run import fuxictr
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.peers import RUNS, needs_runs


@pytest.fixture
def run(tmp_path):
    """A copy of the DCN run that may be spoilt."""
    if not RUNS.is_dir():
        pytest.skip("the FuxiCTR runs are not beside this checkout")
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "dcn", folder)
    for path in [folder, *folder.iterdir()]:
        path.chmod(0o755)
    return folder


def change_json(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def change_config(run, **settings):
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | settings))


def without(run, *keys):
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(path.read_text()).items() if k not in keys}))


def change_weights(run, change):
    weights = dict(torch.load(run / "checkpoint.model", weights_only=True))
    change(weights)
    torch.save(weights, run / "checkpoint.model")


def refused(run, pattern):
    with pytest.raises(InputError, match=pattern):
        fuxictr(find_files(run))


def test_a_truncated_checkpoint_is_refused(run):
    whole = (run / "checkpoint.model").read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 10):
        (run / "checkpoint.model").write_bytes(whole[:size])
        refused(run, r"checkpoint\.model: got .*, expected (a whole file written by torch\.save|a saved state_dict)")


def test_a_checkpoint_that_is_no_checkpoint_is_refused(run, tmp_path):
    (run / "checkpoint.model").write_bytes(b"hello, this is no checkpoint at all")
    refused(run, r"checkpoint\.model: got ")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(InputError, match=r"list\.pt: got 'list', expected a state_dict"):
        read_checkpoint(tmp_path / "list.pt")


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/dpiframe-unpickled",))


def test_a_checkpoint_with_code_is_refused_and_runs_nothing(tmp_path):
    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match=r"evil\.pt: got .*system.*, expected a saved state_dict"):
        read_checkpoint(tmp_path / "evil.pt")
    assert not os.path.exists("/tmp/dpiframe-unpickled")


def test_parameters_that_are_not_finite_are_refused_by_name(run):
    change_weights(run, lambda w: w["fc.bias"].fill_(float("nan")))
    refused(run, r"checkpoint\.model: fc\.bias: got 'NaN or infinity', expected finite parameters")


def test_a_left_over_parameter_is_refused_by_name(run):
    change_weights(run, lambda w: w.update({"gate.weight": torch.zeros(2), "gate.bias": torch.zeros(2)}))
    refused(run, r"got '2 parameters left over', expected a place in FuxiCTR's DCN .* for gate\.weight, gate\.bias")


def test_a_missing_parameter_is_refused_by_name_with_its_neighbours(run):
    change_weights(run, lambda w: w.pop("crossnet.cross_net.1.bias"))
    refused(run, r"crossnet\.cross_net\.1\.bias: got 'no such parameter', expected it, beside crossnet\.")


def test_settings_that_ask_for_another_network_are_refused(run):
    change_config(run, dnn_hidden_units=[64, 16])
    refused(run, r"dnn\.mlp\.2\.weight: got 'shape \[32, 64\]', expected \[16, 64\]")
    change_config(run, dnn_hidden_units=[64, 32, 16])
    refused(run, r"checkpoint\.model: dnn\.mlp: got 'no further layer', expected a linear layer of 16 units, as .*config\.yaml")
    change_config(run, dnn_hidden_units=[64])
    refused(run, r"fc\.weight: got 'shape \[1, 344\]', expected \[1, 376\]")
    change_config(run, dnn_hidden_units=[64, 32], num_cross_layers=2)
    refused(run, r"for crossnet\.cross_net\.2\.bias, crossnet\.cross_net\.2\.weight\.weight")


def test_a_feature_map_without_a_feature_of_the_checkpoint_is_named(run):
    features = json.loads((run / "feature_map.json").read_text())
    name = next(iter(features["features"].pop()))
    (run / "feature_map.json").write_text(json.dumps(features))
    refused(run, rf"feature_map\.json: features: got no {name}, expected it, as .*\.model has .*\.{name}\.weight")


@needs_runs
def test_what_was_taken_for_a_missing_setting_is_told_where_it_does_not_fit(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RUNS / "finalmlp_plain", run)
    without(run, "num_heads")
    with pytest.raises(InputError, match=r"config\.yaml: model FinalMLP: got ") as caught:
        fuxictr(find_files(run))
    assert re.search(r"config\.yaml does not name .*num_heads = 1.*: taken as the library", caught.value.__notes__[0])


def test_a_missing_model_is_named(run):
    without(run, "model")
    refused(run, r"config\.yaml: model: got 'nothing', expected the hyper-parameter, which the checkpoint does not hold")


def test_a_setting_that_lacks_is_the_classs_own_as_in_fuxictrs_configurations(run):
    """Its DCN_test says `crossing_layers`, which the class does not read; its xDeepFM has no `dnn_activations`."""
    without(run, "num_cross_layers")
    without(run, "dnn_activations")
    found = fuxictr(find_files(run))
    assert found.defaults == {"dnn_activations": "ReLU", "num_cross_layers": 3}
    assert "taken as the library's class has it: dnn_activations = ReLU, num_cross_layers = 3" in found.taken_line


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("embedding_dim", r"checkpoint\.model: .*I1\.weight: got 'shape \[8, 1\]', expected \[10, 1\]"),
        ("dnn_hidden_units", r"fc\.weight: got 'shape \[1, 344\]', expected \[1, 312\]"),
    ],
)
def test_what_was_taken_for_it_is_told_where_it_does_not_fit(run, key, pattern):
    without(run, key)
    with pytest.raises(InputError, match=pattern) as caught:
        fuxictr(find_files(run))
    assert re.search(rf"config\.yaml does not name {key} = .*: taken as the library's class has it", caught.value.__notes__[0])


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"model": "Unheard"}, r"config\.yaml: model: got 'Unheard', expected one of AFM, AFN"),
        ({"dnn_activations": "softmax"}, r"dnn_activations: got 'softmax', expected one of none, identity"),
        ({"dnn_activations": ["relu"]}, r"dnn_activations: got \['relu'\], expected one activation for each of 2 layers"),
        ({"task": "regression"}, r"task: got 'regression', expected binary_classification"),
        ({"dnn_hidden_units": [0]}, r"dnn_hidden_units: got \[0\], expected a list of positive integers"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(run, settings, pattern):
    change_config(run, **settings)
    refused(run, pattern)


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"use_features": "C1"}, r"config\.yaml: use_features: got 'C1', expected a list of names"),
        ({"use_features": [["C1"]]}, r"config\.yaml: use_features: got \[\['C1'\]\], expected a list of names"),
        ({"feature_specs": 3}, r"config\.yaml: feature_specs: got 3, expected a list of mappings with names"),
        ({"feature_specs": ["C1"]}, r"config\.yaml: feature_specs: got .*C1.*, expected a mapping of names"),
        ({"feature_specs": [{"embedding_dim": 4}]}, r"feature_specs: name: got \[None\], expected a list of names"),
        (
            {"feature_specs": [{"name": "C1", "embedding_dim": "four"}]},
            r"C1: embedding_dim: got 'four', expected a positive int",
        ),
    ],
)
def test_settings_of_wrong_types_are_refused_by_name(run, settings, pattern):
    change_config(run, **settings)
    refused(run, pattern)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda m: m.update(labels=3), r"feature_map\.json: labels: got 3, expected a list of names"),
        (lambda m: next(f for f in m["features"] if "C3" in f)["C3"].update(type=["categorical"]), r"C3: type: got \['cat"),
        (
            lambda m: next(f for f in m["features"] if "C3" in f)["C3"].update(embedding_dim=[8]),
            r"C3: embedding_dim: got \[8\]",
        ),
    ],
    ids=["labels", "type", "dim"],
)
def test_a_feature_map_of_wrong_types_is_refused_by_name(run, change, pattern):
    change_json(run / "feature_map.json", change)
    refused(run, pattern)


def test_a_feature_map_of_another_run_is_refused(run):
    shutil.copy(RUNS / "din" / "feature_map.json", run / "feature_map.json")
    refused(run, r"feature_map\.json: got '15 unknown features', expected columns of .*processor\.pkl, not userid")
    change_json(run / "feature_map.json", lambda m: m.update(dataset_id="other"))
    refused(run, r"feature_map\.json: dataset_id: got 'other', expected 'd' as in .*config\.yaml")


def test_a_vocabulary_of_another_run_is_refused(run):
    shutil.copy(RUNS / "din" / "feature_vocab.json", run / "feature_vocab.json")
    refused(run, r"feature_vocab\.json: got '26 vocabularies missing', expected one for each of C1, C2, C3")


def test_mismatched_vocabulary_sizes_are_refused_with_the_names(run):
    change_json(run / "feature_vocab.json", lambda v: [v[name].update(extra=len(v[name])) for name in ("C3", "C7")])
    refused(run, r"feature_vocab\.json: got '2 other sizes than .*', expected the same for C3 \(\d+ ids, vocab_size \d+\), C7")


def test_a_table_of_another_size_is_refused_by_name(run):
    change_json(run / "feature_map.json", lambda m: next(f for f in m["features"] if "C3" in f)["C3"].update(vocab_size=9))
    change_json(run / "feature_vocab.json", lambda v: v.update(C3={"__PAD__": 0, "__OOV__": 8}))
    (run / "feature_processor.pkl").unlink()
    change_config(run, feature_cols=columns_without_normalizers(run))
    refused(run, r"embedding_layers\.C3\.weight: got 'shape \[\d+, 8\]', expected \[9, 8\]")


def columns_without_normalizers(run):
    columns = yaml.safe_load((run / "config.yaml").read_text())["feature_cols"]
    return [{k: v for k, v in column.items() if k != "normalizer"} for column in columns]


def test_a_processor_of_another_run_is_refused(run):
    shutil.copy(RUNS / "din" / "feature_processor.pkl", run / "feature_processor.pkl")
    refused(run, r"feature_map\.json: got '39 unknown features', expected columns of .*feature_processor\.pkl, not I1, I2")
    change_json(run / "feature_vocab.json", lambda v: v["C1"].update({"05db9164": 2, "68fd1e64": 1}))
    shutil.copy(RUNS / "dcn" / "feature_processor.pkl", run / "feature_processor.pkl")
    refused(run, r"feature_processor\.pkl: got '1 other vocabularies than .*', expected the same for C1 \(another")


@pytest.mark.parametrize(
    ("column", "pattern"),
    [
        ({"preprocess": "copy_from(I2)"}, r"columns\.C1\.preprocess: got 'copy_from\(I2\)', expected none"),
        ({"dtype": "float"}, r"columns\.C1\.dtype: got 'float', expected str or int for categories"),
        ({"fill_na": 3}, r"columns\.C1\.fill_na: got 3, expected a value of dtype str"),
    ],
)
def test_columns_that_a_schema_cannot_express_are_refused_by_name(run, column, pattern):
    (run / "feature_processor.pkl").unlink()
    columns = columns_without_normalizers(run)
    columns[1] = columns[1] | {"name": [f"C{i}" for i in range(2, 27)]}
    columns.append({"name": "C1", "active": True, "dtype": "str", "type": "categorical"} | column)
    change_config(run, feature_cols=columns)
    refused(run, pattern)


@pytest.mark.parametrize("key", ["pretrained_emb", "category_processor"])
def test_features_that_read_other_files_or_code_are_refused(run, key):
    change_json(run / "feature_map.json", lambda m: next(f for f in m["features"] if "C3" in f)["C3"].update({key: "x"}))
    refused(run, rf"feature_map\.json: C3: {key}: got 'x', expected none")


def test_files_that_are_not_there_are_named(run, tmp_path):
    (run / "config.yaml").unlink()
    with pytest.raises(InputError, match=r"--config: got .*config\.yaml', expected a file"):
        find_files(run)
    with pytest.raises(InputError, match=r"got .no checkpoint., expected one \(\*\.model"):
        find_files(tmp_path)
    with pytest.raises(InputError, match=r"checkpoint: got .*nothing\.model', expected a file"):
        find_files(tmp_path / "nothing.model")


def test_rows_and_scores_that_do_not_fit_are_refused(run, tmp_path):
    source = fuxictr(find_files(run))
    with pytest.raises(InputError, match=r"expected\.csv: got '30 rows', expected 60, as many as the raw rows"):
        write_import(source, tmp_path / "b", rows=run / "test.csv", expected=RUNS / "din" / "expected.csv")
    with pytest.raises(InputError, match=r"test\.csv: got '39 columns missing', expected one for each of I1, I2"):
        write_import(source, tmp_path / "b", rows=RUNS / "din" / "test.csv")
    with pytest.raises(InputError, match=r"test\.csv: click: got 'no such column, or other .*', expected labels of 0"):
        write_import(source, tmp_path / "b", rows=run / "test.csv", label="click")
    with pytest.raises(InputError, match=r"--context: got 'nobody', expected features of the model"):
        fuxictr(find_files(run), ["nobody"])
    assert not (tmp_path / "b").exists()


def test_scores_of_another_model_are_refused_and_nothing_is_written(run, tmp_path):
    with pytest.raises(InputError, match=r"parity: got .\|dp\| up to 0\..* against FuxiCTR's own .*, expected at most 1e-05"):
        write_import(
            fuxictr(find_files(run)), tmp_path / "new" / "b", rows=run / "test.csv", expected=RUNS / "widedeep" / "expected.csv"
        )  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_is_told_in_words_and_leaves_nothing(run, tmp_path):
    source, limits = fuxictr(find_files(run)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # no file may be longer
    try:
        with pytest.raises(
            BundleError, match=r"/new/b: got '.*File too large.*', expected a place that may be written, with room"
        ):
            write_import(source, tmp_path / "new" / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_an_existing_path_is_left_alone(run, tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(BundleError, match=r"b: got an existing path, expected a new one, or a bundle and --overwrite"):
        write_import(fuxictr(find_files(run)), tmp_path / "b", overwrite=True)


def test_a_bundle_refuses_rows_of_another_schema(run, tmp_path):
    write_import(fuxictr(find_files(run)), tmp_path / "b")
    engine = Engine.load(tmp_path / "b", "cpu")
    engine.warmup()
    with pytest.raises(InputError, match=r"candidates: got 'userid', expected a feature of the model"):
        engine.score({"userid": ["1"]})
    engine.close()


@needs_runs
def test_a_damaged_or_foreign_pickle_is_refused(tmp_path):
    whole, path = (RUNS / "dcn" / "feature_processor.pkl").read_bytes(), tmp_path / "p.pkl"
    for size in (0, 1, 500, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"p\.pkl: got '.*', expected a (whole )?FuxiCTR feature processor"):
            read_processor(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(InputError, match=r"p\.pkl: got 'dict', expected a FuxiCTR feature processor"):
        read_processor(path)


def test_keys_of_pretrained_embeddings_are_text_of_numpys_in_the_pickle():
    """FuxiCTR's tokenizers keep them as `numpy.str_`; here they are plain text."""
    whole = pickle.dumps({"vocab": {np.str_("caf\u00e9"): 1}, "numbers": np.array([1.5])}, 4)
    found = _InertUnpickler(io.BytesIO(whole)).load()
    assert found["vocab"] == {"caf\u00e9": 1}
    assert type(next(iter(found["vocab"]))) is str
    for code in ("O", "V8", "U0", "U99999", "f16"):
        with pytest.raises(pickle.UnpicklingError, match=r"got dtype .*, expected float, integer or text"):
            _Dtype(code)


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        (Evil(), r"posix\.system|nt\.system"),
        (types.SimpleNamespace(a=1), r"types\.SimpleNamespace"),
        (collections.Counter("ab"), r"collections\.Counter"),
        (print, r"builtins\.print"),
        (eval, r"builtins\.eval"),
    ],
    ids=["system", "namespace", "counter", "print", "eval"],
)
def test_a_pickle_with_anything_else_is_refused_and_the_class_named(tmp_path, thing, named):
    path = tmp_path / "p.pkl"
    for protocol in (0, 2, 4, 5):
        path.write_bytes(pickle.dumps(thing, protocol))
        with pytest.raises(
            InputError, match=rf"p\.pkl: got .got ({named}|__builtin__\.\w+|_reduce\w*|copyreg.*), expected only the rec"
        ):
            read_processor(path)
    assert not os.path.exists("/tmp/dpiframe-unpickled")


def op(*parts):
    return b"".join(parts) + b"."


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def test_getattr_reaches_nothing_but_a_scalers_transform(tmp_path):
    """The processor's pickle calls getattr; through ours, no other attribute can be had: no `__class__`, no `__globals__`."""
    scaler = text("sklearn.preprocessing._data") + text("StandardScaler") + b"\x93)\x81"
    for name in ("__class__", "__init__", "fields", "transform_"):
        pickled = op(b"\x80\x04", text("builtins"), text("getattr"), b"\x93", scaler, text(name), b"\x86R")
        path = tmp_path / "p.pkl"
        path.write_bytes(pickled)
        with pytest.raises(InputError, match=rf"getattr: got '{name}' of StandardScalerRecord, expected a scaler's transform"):
            read_processor(path)


def test_what_may_be_called_takes_no_state(tmp_path):
    """BUILD on a function would set its attributes, for every later reading of this process."""
    path = tmp_path / "p.pkl"
    path.write_bytes(op(b"\x80\x04", text("builtins"), text("getattr"), b"\x93", b"}", text("_do"), text("x"), b"sb"))
    with pytest.raises(InputError, match=r"got a state for a function, expected none"):
        read_processor(path)
    path.write_bytes(op(b"\x80\x04", text("fuxictr.features"), text("FeatureMap"), b"\x93", b"}", text("a"), text("x"), b"sb"))
    with pytest.raises(InputError, match=r"expected a whole FuxiCTR feature processor|expected a FuxiCTR"):
        read_processor(path)


FEATURE_PROCESSOR = b"\x80\x04" + text("fuxictr.preprocess.feature_processor") + text("FeatureProcessor") + b"\x93)\x81"


def test_a_record_without_a_state_has_no_fields(tmp_path):
    path = tmp_path / "p.pkl"
    path.write_bytes(op(FEATURE_PROCESSOR))
    assert read_processor(path).fields == {}


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x1f", b"p536870911\n"], ids=["LONG_BINPUT", "PUT"])
def test_a_place_in_the_memo_that_no_data_needs_is_refused_before_there_is_a_memo(tmp_path, put):
    path = tmp_path / "p.pkl"
    path.write_bytes(op(FEATURE_PROCESSOR, put))
    with pytest.raises(
        InputError, match=r"p\.pkl: got 'got memo index 536870911, expected at most \d+, the bytes of the file'"
    ):
        read_processor(path)


def test_a_state_dict_gives_each_parameter_once():
    weights = StateDict({"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2)}, "file")
    assert weights.take("a.weight", 2, None).shape == (2, 3)
    with pytest.raises(InputError, match=r"file: a\.weight: got 'no such parameter', expected it, beside a\.bias"):
        weights.take("a.weight", 2, 3)
    with pytest.raises(InputError, match=r"file: a\.bias: got 'shape \[2\]', expected \[3\]"):
        StateDict({"a.bias": torch.ones(2)}, "file").take("a.bias", 3)
    with pytest.raises(InputError, match=r"file: got '1 parameters left over', expected a place in M for a\.bias"):
        weights.finish("M")
    weights.drop("a.bias")
    weights.finish("M")


def test_a_state_dict_may_lie_under_a_key_or_a_prefix(tmp_path):
    for saved in ({"state_dict": {"w": torch.ones(1)}, "epoch": 3}, {"module.w": torch.ones(1)}, {"w": torch.ones(1)}):
        torch.save(saved, tmp_path / "c.pt")
        weights = read_checkpoint(tmp_path / "c.pt")
        weights.take("w", 1)
        weights.finish("M")
    with io.BytesIO() as buffer:
        torch.save({"w": 3}, buffer)
        (tmp_path / "c.pt").write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match=r"c\.pt: w: got 'int', expected a tensor"):
        read_checkpoint(tmp_path / "c.pt")


def test_a_table_that_no_feature_reads_is_said_as_the_feature_that_lacks():
    weights = StateDict({"tables.user.weight": torch.ones(3, 2), "tables.zip.weight": torch.ones(3, 2)}, "file")
    weights.take("tables.user.weight", None, None)
    with pytest.raises(InputError, match=r"spec: features: got 'no zip', expected it, as file has tables\.zip\.weight"):
        weights.no_table_left("tables.", "spec")
