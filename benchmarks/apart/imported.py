"""Suite `imported`: models of the libraries as our importers make them, host to host, held against the model in float64.

A process a model: what takes the CPU runs side by side, what launches on the GPU in turns.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.apart.gpu_turn import GpuTurn
from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed
from benchmarks.systems.launches import dependent_launches
from benchmarks.timing import interleaved
from benchmarks.workloads.imported import run_of
from benchmarks.workloads.imported_specs import SPECS, source_of
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.importers.fuxictr.run import fuxictr_model
from dpiframe_core.importers.raw_rows import random_rows
from dpiframe_core.importers.writing import write_import

_GOLDEN_ROWS, _BLOCKS = 64, 4


def run(
    models: Sequence[str], precisions: Sequence[str], batches: Sequence[int], device: torch.device, failed: Failed, *,
    seconds: float, seed: int, processes: int, limit_s: float,
) -> Iterator[Record]:  # fmt: skip
    """Yields a record a model, precision and batch.

    precisions: "default" is that which an engine chooses. limit_s: from now, after which no model begins.
    """
    end = time.time() + limit_s
    with TemporaryDirectory(prefix="dpiframe-imported-") as folder:
        todo = partial(_measured, precisions=tuple(precisions), batches=tuple(batches), device=str(device), seconds=seconds,
                       seed=seed, folder=Path(folder), end=end)  # fmt: skip
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            waiting: dict[str, Future[list[Record]]] = {model: pool.submit(todo, model) for model in models}
            for model, found in waiting.items():
                try:
                    yield from found.result()
                except Exception as error:
                    failed(f"imported {model}", error)


def _measured(
    model: str, *, precisions: Sequence[str], batches: Sequence[int], device: str, seconds: float, seed: int, folder: Path,
    end: float,
) -> list[Record]:  # fmt: skip
    if time.time() > end:
        raise TimeoutError(f"{model}: got no time left, expected its turn before the limit")
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    gpu = device.startswith("cuda")
    turn = GpuTurn(folder / "turn", torch.cuda.synchronize if gpu else lambda: None)
    start = time.perf_counter()
    source = source_of(model, seed) if model in SPECS else fuxictr_model(*run_of(model, seed))
    written = write_import(source, folder / model)
    encoder = Encoder(source.schema, source.vocabularies)
    import_s = time.perf_counter() - start
    out: list[Record] = []
    for precision in precisions:
        options = EngineOptions(max_batch_rows=max(batches), buckets=tuple(sorted({_GOLDEN_ROWS, *batches})), lanes=1)
        engine = Engine(read_bundle(folder / model), device, None if precision == "default" else precision, options)
        engine.compile()
        with turn:
            report = engine.warmup()
        programs: dict[int, Any] = {c.bucket: c for c in report.calibrations}
        for rows in batches:
            blocks = [encoder.encode(random_rows(source.schema, source.vocabularies, rows, seed + i)) for i in range(_BLOCKS)]
            with turn, torch.inference_mode():
                worst = max(float(np.abs(engine.submit(b) - source.probabilities(b)).max()) for b in blocks[:2])
                times = interleaved({"dpiframe": lambda i, e=engine, b=blocks: e.submit(b[i % len(b)])}, seconds)["dpiframe"]
                device_us = engine.replay_us(blocks[0])
            at = programs.get(rows)
            notes = {"program": at.program, "programs_us": dict(at.microseconds)} if at else {"program": ""}
            graph = engine.program(rows).graph
            out.append(record(
                "imported", "dpiframe", model=model, batch=rows, precision=engine.precision, times=times, device_us=device_us,
                max_abs_err=worst, import_s=round(import_s, 1), warmup_s=round(report.seconds, 1),
                import_deviation=written.parity.max_deviation, launches=dependent_launches(graph) if gpu else None,
                nodes=len(graph.nodes), **notes,
            ))  # fmt: skip
        engine.close()
    return out
