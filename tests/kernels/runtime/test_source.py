"""What kernels are compiled from."""

import shutil

from kernels.runtime import source


def test_a_header_that_changes_changes_the_text_by_which_kernels_are_kept(tmp_path, monkeypatch):
    """Else an upgrade in place would go on running kernels of the old header."""
    before = source.source("waves/wave")
    assert before.startswith((source.FOLDER / "waves/wave.cu").read_text())
    shutil.copytree(source.FOLDER, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    assert source.source("waves/wave") == before
    header = tmp_path / "waves/epilogue.cuh"
    header.write_text(header.read_text().replace("MAX_LOGITS 3", "MAX_LOGITS 4"))
    assert source.source("waves/wave") != before
