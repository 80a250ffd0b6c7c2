"""What an ingress reads of a bundle: as `read_bundle` reads it, with the same faults refused, and without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from dpiframe_core.bundle.bundle import read_bundle, write_bundle
from dpiframe_core.bundle.encoding_files import read_encoding
from dpiframe_core.errors import BundleError
from dpiframe_core.features.encoder import Encoder
from tests.dpiframe_core.bundle.test_bundle import parts


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "b", **parts())
    return tmp_path / "b"


def test_it_is_what_the_bundle_holds(bundle: Path) -> None:
    read, whole = read_encoding(bundle), read_bundle(bundle)
    assert read.manifest == whole.manifest
    assert (read.example, read.fingerprint) == (whole.example, whole.fingerprint)
    assert read.vocabularies.keys() == whole.vocabularies.keys()
    Encoder(read.manifest.feature_schema, read.vocabularies)


def test_tensors_are_not_looked_at(bundle: Path) -> None:
    (bundle / "dense.safetensors").write_bytes(b"short")
    assert read_encoding(bundle).manifest.name == "demo"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab/C1.parquet", b"other", "vocab/C1.parquet: got sha256 "),
        ("example.json", b"{}", "example.json: got sha256 "),
        ("model.yaml", b"format: x", "model.yaml: format: got 'x'"),
        ("model.yaml", None, "model.yaml: got no such file, expected one in every bundle"),
        ("vocab/C1.parquet", None, "No such file or directory"),
    ],
)
def test_a_fault_is_one_line_with_the_file(bundle: Path, file: str, content: bytes | None, message: str) -> None:
    if content is None:
        (bundle / file).unlink()
    else:
        (bundle / file).write_bytes(content)
    with pytest.raises(BundleError) as caught:
        read_encoding(bundle)
    assert str(caught.value).startswith(str(bundle))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_ingress_encodes_and_sends_without_torch(bundle: Path) -> None:
    program = (
        "import sys\n"
        "import deployments.fanin.scorer, deployments.fanin.remote_engine, deployments.serve.http_app\n"
        "from dpiframe_core.features.encoder import Encoder\n"
        "from dpiframe_core.bundle.encoding_files import read_encoding\n"
        f"read = read_encoding({str(bundle)!r})\n"
        "Encoder(read.manifest.feature_schema, read.vocabularies)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
