"""The reader of heads and chunks holds under a fuzzer, with the compiler's sanitizers in it."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DIRECT = HERE.parents[2] / "deployments" / "direct"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    out = tmp_path_factory.mktemp("fuzz") / "http_head_fuzz"
    sources = HERE / "http_head_fuzz.c", DIRECT / "http_head.c"
    command = [compiler, "-g", "-O1", *SANITIZERS, f"-I{DIRECT}", *map(str, sources), "-o", str(out)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in made.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    return out


def test_no_mutation_of_a_request_reads_past_its_bytes_or_breaks_what_is_true_of_a_head(program: Path) -> None:
    ran = subprocess.run([program, "1", "300000"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout) > 20_000  # so many were whole heads: not everything was refused at its first line
