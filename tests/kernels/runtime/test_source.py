"""What kernels are compiled from."""

import shutil

from kernels.runtime import source


def test_a_header_that_changes_changes_the_text_by_which_kernels_are_kept(tmp_path, monkeypatch):
    """Else an upgrade in place would go on running kernels of the old header."""
    before = source.source("wave")
    assert before.startswith((source.FOLDER / "wave.cu").read_text())
    for path in source.FOLDER.glob("*.cu*"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    assert source.source("wave") == before
    header = tmp_path / "epilogue.cuh"
    header.write_text(header.read_text().replace("MAX_LOGITS 3", "MAX_LOGITS 4"))
    assert source.source("wave") != before
