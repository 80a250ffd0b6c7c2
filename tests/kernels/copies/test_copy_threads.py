"""The threads that share copies: how many, and under the thread sanitizer."""

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels"


def ran(out: Path, source: str) -> subprocess.CompletedProcess[str]:
    """The driver with this copy_threads.c in it."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    (out / "copy_threads.c").write_text(source)
    sources = HERE / "copy_threads_race.c", out / "copy_threads.c"
    command = [compiler, "-g", "-O1", "-std=gnu11", "-pthread", "-fsanitize=thread", f"-I{KERNELS}", *map(str, sources)]
    made = subprocess.run([*command, "-o", str(out / "race")], capture_output=True, text=True, check=False)
    if "cannot find" in made.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([out / "race"], capture_output=True, text=True, check=False, env=os.environ | {"TSAN_OPTIONS": ""})
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    return done


@pytest.mark.slow
def test_what_a_piece_wrote_is_read_only_behind_its_mark_and_without_the_mark_the_sanitizer_says_so(tmp_path: Path) -> None:
    source = (KERNELS / "copies" / "copy_threads.c").read_text()
    done = ran(tmp_path, source)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-3000:]
    unmarked = source.replace("__ATOMIC_RELEASE", "__ATOMIC_RELAXED")
    assert unmarked != source
    assert "data race" in ran(tmp_path, unmarked).stderr


def test_as_many_threads_help_as_are_wanted_though_there_are_more(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    sources, made = (HERE / "copy_threads_count.c", KERNELS / "copies" / "copy_threads.c"), tmp_path / "count.so"
    command = [compiler, "-O1", "-std=gnu11", "-pthread", "-shared", "-fPIC", f"-I{KERNELS}", *map(str, sources)]
    subprocess.run([*command, "-o", str(made)], check=True)
    taking_part = ctypes.CDLL(str(made)).taking_part
    for wanted in (8, 3, 1, 0, 2, 8):  # more are begun already from the first one on
        seen = [taking_part(wanted, 40) for _ in range(5)]
        while max(seen) <= wanted and len(seen) < 200:  # the host may be busy
            seen.append(taking_part(wanted, 40))
        assert max(seen) == wanted + 1
        assert min(seen) >= 1
    with ThreadPoolExecutor(1) as other:  # whose threads are awake when its copies end
        many = other.submit(lambda: [taking_part(8, 10) for _ in range(50)])
        assert {taking_part(1, 30) for _ in range(10)} <= {1, 2}
        assert min(many.result()) >= 1
