"""One model, in a process of its own: compiles every peer of its cells beside other jobs, then times in turn.

What takes the CPU, and launches that nobody times, run beside the other jobs; what is timed on the GPU waits for its turn. A
cell is timed as suite `latency` times it, and its records are those of that suite.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch

from benchmarks.apart.gpu_turn import GpuTurn, takes_turns
from benchmarks.host_cores import on_quickest_core
from benchmarks.records.record import Record, record
from benchmarks.systems import systems as known
from benchmarks.systems.cells import check
from benchmarks.systems.held_peers import ATEN, HeldPeers
from benchmarks.systems.launches import dependent_launches
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.system import System
from benchmarks.systems.torch_calls import called
from benchmarks.timing import interleaved
from benchmarks.workloads.inputs import PeerInputs
from benchmarks.workloads.models import workload
from benchmarks.workloads.workload import Form, Workload
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import matmul_precision

_FIRST_SEARCH_S = 30.0  # of Inductor's whole search for a cell, before one was seen


At = tuple[str, int, int]  # precision, rows, contexts


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures.

    Attributes:
        cells: those first that say most.
        known: cells of which an earlier run has a compiled peer. They are searched for or left out; the others first get a
            peer of cuBLAS's products, then a search if there is time.
        seconds: of timing, a system and cell.
        search_until: seconds of the epoch after which no search begins.
        prepare_until: seconds of the epoch after which no cell's peers are begun: cells that have none by then are left out.
        compiled: whether there are compiled peers; without, all cells are timed, of an engine that was late, too.
        eager, descent: whether eager PyTorch is timed too, and what `HeldPeers` says.
        size: smaller tables and layers than published, as the model's own function takes them; for tests.
        gpu: which of the host's the process is to see alone; None: all that this process sees.
    """

    model: str
    cells: tuple[At, ...]
    seconds: float
    seed: int
    search_until: float
    prepare_until: float = inf
    known: frozenset[At] = frozenset()
    compiled: bool = True
    eager: bool = True
    descent: bool = True
    device: str = "cuda:0"
    size: Mapping[str, Any] = field(default_factory=dict)
    gpu: int | None = None

    @property
    def name(self) -> str:
        precisions = dict.fromkeys(precision for precision, _, _ in self.cells)
        return f"{self.model} {'/'.join(precisions)} contexts={'/'.join(map(str, sorted({c for *_, c in self.cells})))}"


@dataclass(eq=False)
class _Cell:
    """One batch size while its systems come together."""

    blocks: Sequence[RowBlock]
    expected: Sequence[Any]
    peers: dict[str, System] = field(default_factory=dict)


@dataclass(eq=False)
class _Side:
    """One precision: its engine for all sizes, and the peers' module."""

    peers: HeldPeers
    engine: Engine | None = None
    warm: bool = False  # or it failed
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)


class JobRun:
    """Runs a job: `prepare` beside others, then `measure` in turns."""

    def __init__(self, job: Job, turn: GpuTurn, failed: Callable[[str, Exception], None]) -> None:
        self.job, self.turn, self.device, self.failed = job, turn, torch.device(job.device), failed
        self.sweep = ModelSweep([job.model], [], [], self.device, failed, job.seconds, seed=job.seed)
        self.w: Workload = workload(job.model, self.device, seed=job.seed, **job.size)
        self.sides = {
            p: _Side(HeldPeers(self.w, p, self.device, job.descent)) for p in dict.fromkeys(p for p, _, _ in job.cells)
        }
        drawn = {size: self._drawn(*size) for size in dict.fromkeys(at[1:] for at in job.cells)}
        self.cells = {at: _Cell(*drawn[at[1:]]) for at in job.cells}
        self.took: list[str] = []
        self._search_s = 0.0

    def prepare(self, is_late: Callable[[], bool] = lambda: False) -> None:
        """Engines and peers of all cells, or of those that are done when it is late.

        A peer that fails is told of, and is not there when the cell is timed.
        """
        for precision, side in self.sides.items():
            if not is_late():
                self._warm(precision, side)
        if not self.job.compiled:
            return
        for at in self.job.cells:
            if at not in self.job.known and not is_late():
                self._compile(at, ATEN)
        for at in self.job.cells:  # what time is left makes peers stronger
            if not is_late() and time.time() + 1.2 * (self._search_s or _FIRST_SEARCH_S) < self.job.search_until:
                self._compile(at, "")

    def measure(self, timed: GpuTurn) -> Iterator[Record]:
        """A cell's records once it is timed. Cells that lack a peer are left out. timed: for one cell of all jobs at once."""
        for at in self.job.cells:
            if self.job.compiled and not self.cells[at].peers:
                continue
            try:
                with timed, self.turn:
                    records = self._timed(*at)
            except Exception as error:
                self.failed(f"{self.job.name} {at}", error)
                continue
            yield from records

    def _drawn(self, rows: int, contexts: int) -> tuple[list[RowBlock], list[Any]]:
        blocks = self.sweep.blocks(self.w, rows, contexts)
        return blocks, known.reference_scores(self.w, blocks)

    def _compile(self, at: At, products: str) -> None:
        (precision, rows, contexts), cell, start = at, self.cells[at], time.time()
        try:
            with matmul_precision(precision):
                made = self.sides[precision].peers.compiled(rows, contexts, products).systems()
                for name, system in made.items():
                    self._check(name, system, at)
        except Exception as error:
            self.failed(f"{self.job.name} {at} {products}", error)
            return
        finally:
            took = time.time() - start
            self.took.append(f"{precision} {rows}{'' if products else ' whole'} {took:.0f}")
            if not products:
                self._search_s = max(took, self._search_s / 2)
        for system in cell.peers.values():
            system.close()
        cell.peers = made

    def _check(self, name: str, system: System, at: At) -> float:
        cell = self.cells[at]
        with torch.inference_mode():
            pairs = zip(map(system.score, cell.blocks), cell.expected, strict=True)
            return max(check(s, e, at[0], f"{name} {self.job.name}") for s, e in pairs)

    def _warm(self, precision: str, side: _Side) -> None:
        side.warm = True
        sizes = {rows for p, rows, _ in self.job.cells if p == precision}
        most = max(64, *sizes)
        options = EngineOptions(max_batch_rows=most, buckets=tuple(sorted({*sizes, most})), lanes=1)
        try:
            with matmul_precision(precision):
                engine = Engine(self.w.bundle(known.golden(self.w)), str(self.device), precision, options)
                report = engine.warmup()
        except Exception as error:
            self.failed(f"{self.job.name} engine", error)
            return
        side.engine = engine
        self.took.append(f"engine {report.seconds:.1f}")
        for c in report.calibrations:
            launches = dependent_launches(engine.program(c.bucket).graph)
            chosen = {"program": c.program, "program_gain": round(c.gain, 3), "programs_us": dict(c.microseconds)}
            side.notes[c.bucket] = chosen | {"launches": launches}

    def _timed(self, precision: str, rows: int, contexts: int) -> list[Record]:
        at, w, side = (precision, rows, contexts), self.w, self.sides[precision]
        if not side.warm:
            self._warm(precision, side)
        cell, systems = self.cells[at], dict[str, System]()
        if side.engine:
            systems["dpiframe"] = System(side.engine.submit, device_us=side.engine.replay_us, notes=side.notes.get(rows, {}))
        if self.job.eager:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            eager = w.module(Form(stacked=False, dtype=dtype, exact=precision == "fp32"))
            systems["eager"] = called(eager, PeerInputs.of(w.schema, rows, contexts), rows, self.device, compiled=False)
        systems |= cell.peers
        with matmul_precision(precision), torch.inference_mode():
            worst = {name: self._check(name, s, at) for name, s in systems.items()}
            count = len(cell.blocks)
            calls = {name: lambda i, s=s: s.score(cell.blocks[i % count]) for name, s in systems.items()}
            around = on_quickest_core if self.device.type == "cuda" else nullcontext
            times = interleaved(calls, self.job.seconds, around=around)
            device_us = {name: s.device_us(cell.blocks[0]) for name, s in systems.items()}
        named = self.sweep.cell(w, contexts) | {"buckets": "exact"}
        found = []
        for name, s in systems.items():
            own: dict[str, Any] = {"times": times[name], "device_us": device_us[name], "max_abs_err": worst[name], **s.notes}
            found.append(record("latency", name, model=w.name, batch=rows, precision=precision, cell=named, **own, **w.facts))
        return found


def work(job: Job, turns: Path, said: Any, go: Any) -> None:
    """A process's whole life.

    Args:
        turns: folder of the locks. said: queue of (kind, value): "ready", "record", "failed", "done". go: event to wait for.
    """

    def failed(what: str, error: Exception) -> None:
        said.put(("failed", f"{what}: {type(error).__name__}: {str(error)[:300]}"))
        traceback.print_exception(error, limit=-6, file=sys.stderr)

    torch.set_num_threads(1)
    wait = torch.cuda.synchronize if job.device.startswith("cuda") else lambda: None
    turn, timed = GpuTurn(turns / f"gpu{job.gpu or 0}", wait), GpuTurn(turns / "timed", wait)
    if job.device.startswith("cuda"):
        takes_turns(turn)
    start = time.time()
    try:
        run = JobRun(job, turn, failed)
        run.took.append(f"begun {time.time() - start:.0f}")
        run.prepare(lambda: time.time() > job.prepare_until)
        of_gpu = f"GPU {turn.held_s:.0f} s, waited {turn.waited_s:.0f} s"
        said.put(("ready", f"{job.name}: {'; '.join(run.took)}; in all {time.time() - start:.0f} s, {of_gpu}"))
        go.wait()
        for r in run.measure(timed):
            said.put(("record", r))
    except Exception as error:
        failed(job.name, error)
    said.put(("done", job.name))
