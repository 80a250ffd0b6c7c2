"""Which ways a linear layer on a GPU may choose from, as far as that shows without one."""

import shutil

import pytest

from kernels.dense import linear


@pytest.mark.parametrize(
    ("compiler", "named", "builds"), [("gcc", "", True), ("clang", "", True), ("tcc", "", False), ("", "cc", True)]
)
def test_triton_is_offered_only_where_it_finds_a_c_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, named: str, builds: bool
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == compiler else None)
    monkeypatch.setenv("CC", named)
    linear._triton_builds.cache_clear()
    try:
        assert linear._triton_builds() is builds
        assert ("no C compiler" in caplog.text) is not builds
    finally:
        linear._triton_builds.cache_clear()
