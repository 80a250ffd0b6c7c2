"""What is wrong with a spec, a vocabulary or a checkpoint is told by its file and key, in one sentence that says what to do."""

import pytest
import torch

from dpiframe_core.errors import InputError
from dpiframe_core.importers.fuxictr.files import find_files
from dpiframe_core.importers.model_spec import read_spec
from dpiframe_core.importers.own_class import own_class
from dpiframe_core.importers.state_dict import read_checkpoint

FEATURE = "model: DeepFM\nfeatures: [{name: a}, %s]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: DeepFM\n", "features: got nothing, expected a value"),
        ("model: DeepFM\nfeatures: []\n", "features: got [], expected "),
        (FEATURE % "{kind: dens, name: b}", "features.1: got kind 'dens', expected one of 'sparse', 'dense'"),
        (FEATURE % "{kind: dense, name: b, max_values: 3}", "features.1.dense.max_values: got 3, expected no such key"),
        (FEATURE % "{name: b, name: c}", "got the key 'name' twice in "),
        ("model: [\n", "got while parsing a flow node"),
        (FEATURE % "{name: b, vocabulary: b.json}", "b.vocabulary: got '{folder}/b.json', expected a file, named as seen from"),
    ],
)
def test_a_spec(tmp_path, text, message):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_spec(path)
    assert str(caught.value).startswith(f"{path}: {message.format(folder=tmp_path)}")


def test_a_vocabulary_that_is_cut_off_is_named_itself(tmp_path):
    (tmp_path / "spec.yaml").write_text(FEATURE % "{name: b, vocabulary: b.json, values: string}")
    (tmp_path / "b.json").write_text('{"x": 1,')
    with pytest.raises(InputError) as caught:
        read_spec(tmp_path / "spec.yaml")
    assert str(caught.value).startswith(f"{tmp_path}/b.json: got 'Expecting property name enclosed in double quotes: line 1")
    assert str(caught.value).endswith("expected a JSON object of string values and ids")
    for text in ('["x"]', "{}", "[]"):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(InputError, match=r"b\.json: got 'no entries', expected a JSON object of string values and ids$"):
            read_spec(tmp_path / "spec.yaml")


@pytest.mark.parametrize(
    ("values", "text", "twice"), [("string", '{"x": 1, "y": 2, "x": 3}', "'x'"), ("int", '{"1": 1, "01": 2}', "1")]
)
def test_a_vocabulary_has_each_value_once(tmp_path, values, text, twice):
    (tmp_path / "spec.yaml").write_text(FEATURE % f"{{name: b, vocabulary: b.json, values: {values}}}")
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(InputError) as caught:
        read_spec(tmp_path / "spec.yaml")
    assert str(caught.value) == f"{tmp_path}/b.json: vocabulary: got {twice} twice, expected distinct values"


def test_a_checkpoint_that_is_a_folder_or_a_whole_model(tmp_path):
    with pytest.raises(InputError, match=r"^checkpoint: got '.*', expected a file that torch.save wrote$"):
        read_checkpoint(tmp_path)
    torch.save(torch.nn.Linear(2, 1), tmp_path / "whole.pt")
    with pytest.raises(InputError, match=r"expected a saved state_dict: torch\.save\(model\.state_dict\(\), \.\.\)$"):
        read_checkpoint(tmp_path / "whole.pt")


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "net"])
def test_a_state_dict_may_lie_among_other_things(tmp_path, key):
    torch.save({"epoch": 3, key: {"w": torch.ones(2)}, "optimizer": {"step": 1}}, tmp_path / "c.pt")
    assert read_checkpoint(tmp_path / "c.pt").shape("w") == (2,)


def test_a_folder_without_a_checkpoint_and_a_source_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"got 'no checkpoint', expected one \(\*\.model, .*with the run's files beside it"):
        find_files(tmp_path)
    with pytest.raises(InputError, match=r"--source: got '.*none\.py', expected a file of Python"):
        own_class(f"{tmp_path}/none.py:Model")
    with pytest.raises(InputError, match=r"--source: got 'none\.py', expected FILE\.py:CLASS"):
        own_class("none.py")
