"""What kernels are compiled from."""

import shutil

from kernels.source import FOLDER, source


def test_a_header_that_changes_changes_the_text_by_which_kernels_are_kept(tmp_path):
    """Else an upgrade in place would go on running kernels of the old header."""
    for path in FOLDER.glob("*.cu*"):
        shutil.copy(path, tmp_path)
    before = source("wave", tmp_path)
    assert before == source("wave")
    assert before.startswith((FOLDER / "wave.cu").read_text())
    header = tmp_path / "epilogue.cuh"
    header.write_text(header.read_text().replace("MAX_LOGITS 3", "MAX_LOGITS 4"))
    assert source("wave", tmp_path) != before
