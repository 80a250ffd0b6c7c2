"""A module of ours whose C extensions have the compiler's sanitizers in them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")


def run_sanitized(module: str, arguments: tuple[str, ...], run_folder: Path, within_s: float) -> str:
    """What it prints; fails with its report. The extensions are built once in a run. Skips without a compiler that has them."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the compiler has no sanitizers")
    # The compiler itself without them and with its last word, -O1: a third of the time.
    own = f"""sh -c 'exec env -u LD_PRELOAD {compiler} "$@" -O1' cc"""
    environment = os.environ | {
        "CC": f"{own} {' '.join(SANITIZERS)} -g",
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",  # of a program that ends are none
        "XDG_CACHE_HOME": str(run_folder / "sanitized"),
        "PYTHONMALLOC": "malloc",  # else bytes lie side by side, and what is read behind one's end is another's
    }
    command, root = [sys.executable, "-m", module, *arguments], Path(__file__).parents[2]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment, timeout=within_s)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return ran.stdout
