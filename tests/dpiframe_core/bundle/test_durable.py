"""A bundle is on the disk before it has its name: a power failure leaves a whole one, or none."""

import os
from pathlib import Path

import pytest

from dpiframe_core.graph.architecture import DeepFM
from tests.runner import small_bundle


def test_every_file_and_folder_is_synced_before_a_bundle_gets_its_name_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int | Path]] = []
    rename = Path.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(("synced", os.fstat(descriptor).st_ino)))
    monkeypatch.setattr(Path, "rename", lambda own, to: (rename(own, to), done.append(("named", to)))[0])
    path = tmp_path / "bundle"
    small_bundle(path, DeepFM(hidden_units=(4,)))
    named = done.index(("named", path))
    assert {one.stat().st_ino for one in [path, *path.rglob("*")]} <= {
        inode for what, inode in done[:named] if what == "synced"
    }
    assert done[named + 1 :] == [("synced", tmp_path.stat().st_ino)]
