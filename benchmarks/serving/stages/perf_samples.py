"""What processes were at, sampled by Linux's `perf`: a sample each 1/`RATE` s of CPU time of a thread, with its stack.

Stacks are unwound by the programs' own tables, so that code without frame pointers is in them. Python from 3.12 on names its
functions to perf where `ENVIRONMENT` is set: a stack ends at the innermost of them.
"""

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

RATE = 499  # a prime: in step with no timer
ENVIRONMENT = {"PYTHONPERFSUPPORT": "1"}
_STACK = "dwarf,8192"
_KERNEL = "[kernel"


@dataclass(frozen=True, slots=True)
class Frame:
    """A function, and the file that holds it. A function of Python is `py::NAME:FILE`."""

    symbol: str
    file: str


@dataclass(frozen=True, slots=True)
class Sample:
    """frames: innermost first; those of the kernel, if any, before the program's."""

    pid: int
    frames: tuple[Frame, ...]

    @property
    def in_kernel(self) -> bool:
        return bool(self.frames) and self.frames[0].file.startswith(_KERNEL)


@contextmanager
def sampled(perf: str, pids: Sequence[int], seconds: float) -> Iterator[list[Sample]]:
    """Samples these processes for so long from now on. The list is full once the block is over.

    Raises:
        RuntimeError: perf cannot, in its own words.
    """
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "perf.data"
        record = [perf, "record", "-q", "-e", "task-clock", "-F", str(RATE), "--call-graph", _STACK]
        whom = ["-p", ",".join(map(str, pids)), "-o", str(data), "--", "sleep", str(seconds)]
        recording = subprocess.Popen([*record, *whom], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield samples
        finally:
            _, said = recording.communicate()
        if not data.exists() or recording.returncode:
            raise RuntimeError(f"perf record: got {said.strip()!r} and exit status {recording.returncode}, expected samples")
        command = [perf, "script", "-i", str(data), "--no-inline", "-F", "comm,pid,tid,event,ip,sym,dso"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as script:
            assert script.stdout is not None
            samples.extend(samples_in(script.stdout))


def samples_in(lines: IO[str] | Sequence[str]) -> Iterator[Sample]:
    """The samples in what `perf script` prints: a line "COMMAND PID/TID EVENT:", then one "ADDRESS SYMBOL (FILE)" a frame."""
    pid, frames = None, list[Frame]()
    for line in lines:
        if not line.strip():
            continue
        if not line[0].isspace():
            if pid is not None:
                yield Sample(pid, tuple(frames))
            pid, frames = int(line.rpartition("/")[0].split()[-1]), []
            continue
        symbol, _, file = line.split(maxsplit=1)[1].rstrip().rpartition(" (")
        frames.append(Frame(symbol, file.removesuffix(")")))
    if pid is not None:
        yield Sample(pid, tuple(frames))
