"""One model in one precision, in a process of its own: compiles every peer of its cells beside other jobs, then times in turn.

What takes the CPU runs beside the other jobs; what launches on the GPU waits for its turn. A cell is timed as suite `latency`
times it, and its records are those of that suite.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.gpu_turn import GpuTurn, inductor_takes_turns
from benchmarks.records.record import Record, record
from benchmarks.systems import systems as known
from benchmarks.systems.cells import check
from benchmarks.systems.held_peers import ATEN, HeldPeers
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.system import System
from benchmarks.systems.torch_calls import called
from benchmarks.timing import interleaved
from benchmarks.workloads.inputs import PeerInputs
from benchmarks.workloads.models import workload
from benchmarks.workloads.workload import Form, Workload
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from kernels.dense.linear import matmul_precision

_SEARCHED = (1024, 256)  # rows whose peers are searched for first
_FIRST_SEARCH_S, _PLAIN_S = 45.0, 12.0  # of a cell, before one was seen: Inductor's whole search; cuBLAS's products alone


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures.

    Attributes:
        cells: (rows, contexts), those first whose peer should have Inductor's whole search.
        plain_first: begin with the cells that need no search: another job finds meanwhile what this one's products share.
        seconds: of timing, a system and cell.
        search_until: seconds of the epoch after which no search begins.
        size: smaller tables and layers than published, as the model's own function takes them; for tests.
    """

    model: str
    precision: str
    cells: tuple[tuple[int, int], ...]
    seconds: float
    seed: int
    search_until: float
    plain_first: bool = False
    device: str = "cuda:0"
    size: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model} {self.precision} contexts={'/'.join(map(str, sorted({c for _, c in self.cells})))}"


@dataclass(eq=False)
class _Cell:
    """One batch size while its systems come together."""

    rows: int
    contexts: int
    blocks: list[Any]
    expected: list[Any]
    peers: dict[str, System]
    searched: bool = False


class JobRun:
    """Runs a job: `prepare` beside others, then `measure` in one turn."""

    def __init__(self, job: Job, turn: GpuTurn, failed: Callable[[str, Exception], None]) -> None:
        self.job, self.turn, self.device, self.failed = job, turn, torch.device(job.device), failed
        self.sweep = ModelSweep([job.model], [job.precision], [], self.device, failed, job.seconds, seed=job.seed)
        self.w: Workload = workload(job.model, self.device, seed=job.seed, **job.size)
        self.engine: Engine | None = None
        self.notes: dict[int, dict[str, Any]] = {}
        self.took: list[str] = []
        self._search_s = 0.0

    def prepare(self) -> None:
        """Engine and peers of all cells. A peer that fails is told of, and is not there when the cell is timed."""
        self.cells = {at: self._drawn(*at) for at in self.job.cells}
        held = HeldPeers(self.w, self.job.precision, self.device)
        order = sorted(self.cells, key=lambda at: at[0] in _SEARCHED) if self.job.plain_first else list(self.cells)
        for i, at in enumerate(order):
            if self.engine is None and self.turn.at_once():
                self._in_hand(self._warm)
            left = len(order) - i - 1
            self._compile(held, at, ATEN if at[0] not in _SEARCHED or not self._may_search(left) else "")
        if self.engine is None:
            with self.turn:
                self._warm()
        for at in self.job.cells:  # what time is left makes peers stronger
            if not self.cells[at].searched and self._may_search(0):
                self._compile(held, at, "")

    def measure(self) -> Iterator[Record]:
        """A cell's records once it is timed."""
        for at in self.job.cells:
            try:
                with self.turn:
                    records = self._timed(self.cells[at])
            except Exception as error:
                self.failed(f"{self.job.name} {at}", error)
                continue
            yield from records

    def _drawn(self, rows: int, contexts: int) -> _Cell:
        blocks = self.sweep.blocks(self.w, rows, contexts)
        with self.turn:
            expected = known.reference_scores(self.w, blocks)
        return _Cell(rows, contexts, blocks, expected, {})

    def _may_search(self, cells_left: int) -> bool:
        needs = 1.2 * (self._search_s or _FIRST_SEARCH_S) + _PLAIN_S * cells_left
        return time.time() + needs < self.job.search_until

    def _compile(self, held: HeldPeers, at: tuple[int, int], products: str) -> None:
        cell, start = self.cells[at], time.time()
        try:
            with matmul_precision(self.job.precision):
                peer = held.compiled(*at, products)
                with self.turn:
                    made = peer.systems()
                    for name, system in made.items():
                        self._check(name, system, cell)
        except Exception as error:
            self.failed(f"{self.job.name} {at} {products}", error)
            return
        finally:
            took = time.time() - start
            self.took.append(f"{at[0]}/{at[1]}{'' if products else ' whole'} {took:.0f}")
            if not products:
                self._search_s = max(took, self._search_s / 2)
        for system in cell.peers.values():
            system.close()
        cell.peers, cell.searched = made, not products

    def _check(self, name: str, system: System, cell: _Cell) -> float:
        with torch.inference_mode():
            scores = map(system.score, cell.blocks)
            return max(
                check(s, e, self.job.precision, f"{name} {self.job.name}") for s, e in zip(scores, cell.expected, strict=True)
            )

    def _in_hand(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self.turn.__exit__(None, None, None)

    def _warm(self) -> None:
        sizes = {rows for rows, _ in self.job.cells}
        most = max(64, *sizes)
        options = EngineOptions(max_batch_rows=most, buckets=tuple(sorted({*sizes, most})), lanes=1)
        try:
            with matmul_precision(self.job.precision):
                engine = Engine(self.w.bundle(known.golden(self.w)), str(self.device), self.job.precision, options)
                report = engine.warmup()
        except Exception as error:
            self.failed(f"{self.job.name} engine", error)
            return
        self.engine = engine
        self.took.append(f"engine {report.seconds:.1f} ({len(report.buckets)} buckets)")
        for c in report.calibrations:
            self.notes[c.bucket] = {"program": c.program, "program_gain": round(c.gain, 3)}

    def _timed(self, cell: _Cell) -> list[Record]:
        job, w = self.job, self.w
        systems: dict[str, System] = {}
        if self.engine:
            note = self.notes.get(cell.rows, {})
            systems["dpiframe"] = System(self.engine.submit, device_us=self.engine.replay_us, notes=note)
        dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
        form = Form(stacked=False, dtype=dtype, exact=job.precision == "fp32")
        inputs = PeerInputs.of(w.schema, cell.rows, cell.contexts)
        systems["eager"] = called(w.module(form), inputs, cell.rows, self.device, compiled=False)
        systems |= cell.peers
        with matmul_precision(job.precision), torch.inference_mode():
            worst = {name: self._check(name, s, cell) for name, s in systems.items()}
            count = len(cell.blocks)
            calls = {name: lambda i, s=s: s.score(cell.blocks[i % count]) for name, s in systems.items()}
            times = interleaved(calls, job.seconds)
            device_us = {name: s.device_us(cell.blocks[0]) for name, s in systems.items()}
        named = self.sweep.cell(w, cell.contexts) | {"buckets": "exact"}
        return [
            record(
                "latency", name, model=w.name, batch=cell.rows, precision=job.precision, cell=named, times=times[name],
                device_us=device_us[name], max_abs_err=worst[name], **s.notes, **w.facts,
            )
            for name, s in systems.items()
        ]  # fmt: skip


def work(job: Job, lock: Path, said: Any, go: Any) -> None:
    """A process's whole life. said: queue of (kind, value): "ready", "record", "failed", "done"; go: event to wait for."""

    def failed(what: str, error: Exception) -> None:
        said.put(("failed", f"{what}: {type(error).__name__}: {str(error)[:300]}"))
        traceback.print_exception(error, limit=-6, file=sys.stderr)

    torch.set_num_threads(1)
    turn = GpuTurn(lock, torch.cuda.synchronize if job.device.startswith("cuda") else lambda: None)
    inductor_takes_turns(turn)
    start = time.time()
    try:
        run = JobRun(job, turn, failed)
        run.took.append(f"begin {time.time() - start:.0f}")
        run.prepare()
        said.put(("ready", f"{job.name}: {'; '.join(run.took)}; in all {time.time() - start:.0f} s"))
        go.wait()
        for r in run.measure():
            said.put(("record", r))
    except Exception as error:
        failed(job.name, error)
    said.put(("done", job.name))
