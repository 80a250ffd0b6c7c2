"""The reader of heads and chunks, and the listener around it, under fuzzers with the sanitizers of the compiler in them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deployments.sanitized import SANITIZERS, run_sanitized

HERE = Path(__file__).parent
NATIVE = HERE.parents[2] / "deployments" / "direct" / "native"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    out = tmp_path_factory.mktemp("fuzz") / "http_head_fuzz"
    sources = HERE / "fuzz" / "http_head_fuzz.c", NATIVE / "http_head.c"
    command = [compiler, "-g", "-O1", *SANITIZERS, f"-I{NATIVE}", *map(str, sources), "-o", str(out)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in made.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    return out


def test_no_mutation_of_a_request_reads_past_its_bytes_or_breaks_what_is_true_of_a_head(program: Path) -> None:
    ran = subprocess.run([program, "1", "300000"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout) > 20_000  # so many were whole heads: not everything was refused at its first line


@pytest.mark.slow
@pytest.mark.parametrize(
    "driver",
    [
        ("listener_fuzz", "3", "4000"),
        ("express_fuzz", "1", "1500"),
        pytest.param(("express_fuzz", "2", "3000"), marks=pytest.mark.whole),
        ("split_fuzz", "1", "15000"),
    ],
)
def test_hostile_clients_broken_engines_cut_streams_and_answers_to_nobody_break_nothing_in_the_listener(
    run_folder: Path, driver: tuple[str, str, str]
) -> None:
    name, *given = driver
    said = run_sanitized(f"tests.deployments.direct.fuzz.{name}", tuple(given), run_folder, 600)
    assert min(map(int, said.split()[:2])) > 20  # so many were told of, and answered; on a busy host fewer
