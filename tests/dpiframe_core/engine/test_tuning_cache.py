"""The cache of choices: what was stored comes back, and anything else in its place is ignored with a line in the log."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpiframe_core.engine import tuning_cache
from dpiframe_core.engine.tuning_cache import TuningKey, cache_folder, load_choices, store_choices, tuning_key

KEY = TuningKey("f" * 64, "tf32", "NVIDIA H200", "580.95", "2.11.0+cu130", "14.2.0", "5" * 64)
MADE = {"deep.0@256": "triton-64x64x64-w4-s4", "cross.0@1": "product-transposed"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dpiframe"


def test_what_is_stored_is_loaded(folder, caplog):
    assert load_choices(KEY) == {}
    store_choices(KEY, MADE)
    assert load_choices(KEY) == MADE
    assert [path.name for path in folder.iterdir()] == [KEY.path.name]
    assert caplog.text == ""


def test_choices_are_added_to_those_of_other_buckets():
    store_choices(KEY, MADE)
    store_choices(KEY, {"deep.0@256": "epilogue", "deep.0@64": "product"})
    assert load_choices(KEY) == {**MADE, "deep.0@256": "epilogue", "deep.0@64": "product"}


@pytest.mark.parametrize("field", ["fingerprint", "precision", "gpu"])
def test_bundles_precisions_and_gpus_keep_files_of_their_own(field):
    other = replace(KEY, **{field: "another"})
    store_choices(KEY, MADE)
    store_choices(other, {"x@1": "y"})
    assert (load_choices(KEY), load_choices(other)) == (MADE, {"x@1": "y"})


@pytest.mark.parametrize("field", ["driver", "torch", "cupy", "source"])
def test_choices_of_another_version_are_stale_and_replaced(field, folder, caplog):
    store_choices(KEY, {"old@1": "way"})
    newer = replace(KEY, **{field: "newer"})
    assert load_choices(newer) == {}
    assert f"{field}: got '{getattr(KEY, field)}', expected 'newer'" in caplog.text
    store_choices(newer, MADE)
    assert load_choices(newer) == MADE
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got 0 bytes of something else, expected JSON"),
        (b'{"key": {', "got 9 bytes of something else, expected JSON"),
        (b"\xff\xfe\x00", "expected JSON"),
        (b"[" * 100_000, "got 100000 bytes of something else, expected JSON"),
        (b"x" * (2**20 + 1), "got more than 1048576 bytes"),
        (b"[1]", "got JSON of another form, expected the objects `key` and `choices`"),
        (b'{"key": [], "choices": {}}', "got JSON of another form"),
        (b'{"key": {}, "choices": {}, "more": 1}', "got JSON of another form"),
        (b'{"key": {}, "choices": {}}', "fingerprint: got 'None', expected"),
    ],
    ids=["empty", "cut", "binary", "deep", "huge", "list", "no-key", "unknown", "foreign"],
)
def test_a_file_that_is_not_ours_is_ignored_and_replaced(content, message, folder, caplog):
    folder.mkdir(parents=True)
    KEY.path.write_bytes(content)
    assert load_choices(KEY) == {}
    assert message in caplog.text
    store_choices(KEY, MADE)
    assert load_choices(KEY) == MADE


@pytest.mark.parametrize("bad", [["deep.0@256"], {"deep.0@256": 3}, None])
def test_choices_that_are_no_names_are_ignored(bad, caplog):
    store_choices(KEY, MADE)
    content = json.loads(KEY.path.read_text())
    KEY.path.write_text(json.dumps({**content, "choices": bad}))
    assert load_choices(KEY) == {}
    assert "choices: got something else, expected names by name" in caplog.text


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store_choices(KEY, MADE)
    assert load_choices(KEY) == {}
    assert "choices of this warm-up are not kept for the next one" in caplog.text


def test_a_write_that_fails_leaves_the_old_file_and_no_other(folder, monkeypatch, caplog):
    store_choices(KEY, MADE)

    def fail(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(tuning_cache.os, "replace", fail)
    store_choices(KEY, {"more@1": "way"})
    assert load_choices(KEY) == MADE
    assert [path.name for path in folder.iterdir()] == [KEY.path.name]
    assert "disk full" in caplog.text


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / ".cache" / "dpiframe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "dpiframe"


def test_the_key_names_this_machine_and_the_source_of_the_kernels(tmp_path, monkeypatch):
    key = tuning_key("f" * 64, "fp32", torch.device("cpu"))
    assert (key.fingerprint, key.precision, key.gpu, key.torch) == ("f" * 64, "fp32", "", torch.__version__)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.cu").write_text("one")
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(tuning_cache.kernels, "__file__", str(tmp_path / "__init__.py"))
    hashes = [key.source]
    for text in ("one", "two"):
        (tmp_path / "room" / "a.cu").write_text(text)
        tuning_cache.kernel_source_hash.cache_clear()
        hashes.append(tuning_cache.kernel_source_hash())
    tuning_cache.kernel_source_hash.cache_clear()
    assert len(set(hashes)) == 3


@pytest.mark.gpu
def test_the_key_of_a_gpu_names_it_and_its_driver():
    key = tuning_key("f" * 64, "tf32", torch.device("cuda", 0))
    assert key.gpu == torch.cuda.get_device_name(0)
    assert key.driver[0].isdigit()
    assert key.cupy[0].isdigit()


def test_a_missing_file_is_no_news(caplog):
    with caplog.at_level(logging.DEBUG):
        assert load_choices(KEY) == {}
    assert caplog.text == ""
    assert not Path(cache_folder()).exists()
