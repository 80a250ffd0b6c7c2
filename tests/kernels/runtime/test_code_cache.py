"""Code that is kept for the next start is taken only from where nobody else can have put it."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from time import sleep
from types import SimpleNamespace

import pytest

from kernels.runtime import code_cache
from kernels.runtime.code_cache import find_code, store_code

NAME = "thing.so"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dpiframe"


def test_what_was_kept_is_found_again(folder):
    assert find_code(NAME) is None
    made = store_code(NAME, b"code")
    assert made == folder / NAME
    assert find_code(NAME) == made
    assert made.read_bytes() == b"code"
    assert [p.name for p in folder.iterdir()] == [NAME]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_neither_read_nor_written(folder, mode):
    store_code(NAME, b"code")
    folder.chmod(mode)
    assert find_code(NAME) is None
    elsewhere = store_code("other.so", b"code")
    assert elsewhere.parent != folder
    assert elsewhere.read_bytes() == b"code"
    folder.chmod(0o700)
    assert find_code(NAME) == folder / NAME


def test_a_file_that_others_may_write_is_not_read(folder):
    store_code(NAME, b"code").chmod(0o666)
    assert find_code(NAME) is None


def test_a_link_is_not_followed(folder, tmp_path):
    store_code(NAME, b"code")
    (tmp_path / "theirs.so").write_bytes(b"bad")
    (folder / NAME).unlink()
    (folder / NAME).symlink_to(tmp_path / "theirs.so")
    assert find_code(NAME) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_not_read(folder):
    os.chown(store_code(NAME, b"code"), 12345, -1)
    assert find_code(NAME) is None


def test_an_empty_file_is_no_code(folder):
    store_code(NAME, b"")
    assert find_code(NAME) is None


def test_threads_that_have_no_cache_share_a_folder_of_the_process(monkeypatch, tmp_path):
    """Of several that were made at once all but one would go at once, with what lies in them."""
    made, together = [], Barrier(8)

    def folder(prefix):
        made.append(prefix)
        sleep(0.02)
        return SimpleNamespace(name=str(tmp_path))

    def write(i):
        together.wait()
        return store_code(f"{i}.so", b"%d" % i)

    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    monkeypatch.setattr(code_cache, "TemporaryDirectory", folder)
    monkeypatch.setattr(code_cache, "_temporary_folder", cache(code_cache._temporary_folder.__wrapped__))
    with ThreadPoolExecutor(8) as threads:
        assert [path.read_bytes() for path in threads.map(write, range(8))] == [b"%d" % i for i in range(8)]
    assert made == ["dpiframe-"]
