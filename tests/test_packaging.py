"""An installation has what the sources need: setuptools takes the configuration, and every C and CUDA file is package data."""

from fnmatch import fnmatch
from pathlib import Path

from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).parents[1]


def test_every_source_that_is_compiled_at_run_time_is_package_data() -> None:
    packages = read_configuration(ROOT / "pyproject.toml")["tool"]["setuptools"]["package-data"]
    patterns = packages[""]  # of every package: how setuptools reads "*"
    files = [path for path in (ROOT / "kernels").rglob("*.*") if path.suffix in (".c", ".h", ".cu", ".cuh")]
    assert files
    assert not [path.name for path in files if not any(fnmatch(path.name, pattern) for pattern in patterns)]
    assert not [path for path in files if not (path.parent / "__init__.py").is_file()], (
        "a folder that is no package has no data"
    )
