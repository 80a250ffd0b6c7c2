"""Suite `contexts`: the paper's models with half of their fields from the context, host to host. Waves that multiply each row's
columns (`waves`) beside what the engine's warm-up finds fastest (`dpiframe`): where it pays, what rows share once a context.
"""

from collections.abc import Iterator, Sequence

import torch

from benchmarks.records.record import Record, record
from benchmarks.systems.cells import BATCHES_IN_ROTATION, Failed, check, offered
from benchmarks.systems.systems import golden, reference_scores
from benchmarks.timing import interleaved
from benchmarks.workloads.blocks import drawn_blocks
from benchmarks.workloads.paper import paper_model
from benchmarks.workloads.workload import CRITEO, Workload
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from kernels.dense.linear import matmul_precision

OF_CONTEXT = len(CRITEO) // 2 + 1  # of 39 fields
_POLICIES = {"waves": "waves", "dpiframe": "auto"}
_GOLDEN_ROWS = 64


def run(
    models: Sequence[str],
    precisions: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    device: torch.device,
    failed: Failed,
    *,
    seconds: float,
    seed: int,
    most_rows: int | None,
) -> Iterator[Record]:
    """Yields a record a system and cell (model, precision, batch, contexts)."""
    for model in models:
        w = paper_model(model, device, seed=seed, most_rows=most_rows, of_context=OF_CONTEXT)
        for precision in offered(precisions, device):
            for rows in batches:
                try:
                    with matmul_precision(precision):
                        yield from _cells(w, precision, rows, [n for n in contexts if n <= rows], device, seconds, seed)
                except Exception as error:
                    failed(f"contexts {model} {precision} B={rows}", error)
        del w


def _cells(
    w: Workload, precision: str, rows: int, contexts: Sequence[int], device: torch.device, seconds: float, seed: int
) -> Iterator[Record]:
    most, engines, notes = max(rows, _GOLDEN_ROWS), {}, {}
    for name, policy in _POLICIES.items():
        options = EngineOptions(max_batch_rows=most, buckets=tuple(sorted({rows, most})), lanes=1, policy=policy)
        engines[name] = engine = Engine(w.bundle(golden(w)), str(device), precision, options)
        found = next((c for c in engine.warmup().calibrations if c.bucket >= rows), None)
        notes[name] = {"program": found.program, "programs_us": dict(found.microseconds)} if found else {}
    for n in contexts:
        blocks = drawn_blocks(w.schema, rows, BATCHES_IN_ROTATION, contexts=n, seed=seed + rows)
        expected = reference_scores(w, blocks)
        with torch.inference_mode():
            worst = {
                name: max(check(e.submit(b), s, precision, name) for b, s in zip(blocks, expected, strict=True))
                for name, e in engines.items()
            }
            calls = {name: lambda i, e=e, b=blocks: e.submit(b[i % len(b)]) for name, e in engines.items()}
            times = interleaved(calls, seconds)
        for name, engine in engines.items():
            yield record(
                "contexts", name, model=w.name, batch=rows, precision=precision,
                cell={"contexts": n, "fields_of_context": OF_CONTEXT}, times=times[name], max_abs_err=worst[name],
                device_us=engine.replay_us(blocks[0]), **notes[name],
            )  # fmt: skip
    for engine in engines.values():
        engine.close()
