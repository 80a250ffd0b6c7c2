"""The systems that are compared. Each takes a batch from host memory to scores in host memory, as a server would call it."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from benchmarks.systems.fbgemm import TableBatch
from benchmarks.systems.names import SYSTEMS
from benchmarks.systems.torch_models import Model, Stacked, TablePerField
from benchmarks.systems.workload import Workload, id_blocks, wide_ids
from benchmarks.timing import Captured
from dpiframe_core.bundle.bundle import Golden
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import matmul_precision

Score = Callable[[RowBlock], np.ndarray]
Compute = Callable[[torch.Tensor], torch.Tensor]  # ids int32[rows, fields] on the device -> probabilities [rows, 1]


@dataclass(frozen=True, eq=False)
class System:
    """A way to score, host to host, to be called under `torch.inference_mode`. `close` frees what it holds.

    device_us: device-only time of one call, replayed back to back; None where it cannot be told from the launches.
    first_op_s: seconds of one call from its first operator's launch, the ids being there, to the scores in host memory.
    notes: what its records say besides.
    """

    score: Score
    close: Callable[[], None] = lambda: None
    device_us: Callable[[RowBlock], float | None] = lambda block: None
    first_op_s: Callable[[RowBlock], float] | None = None
    notes: Mapping[str, object] = field(default_factory=dict)


def build(name: str, w: Workload, rows: int, precision: str, device: torch.device, *, buckets: str = "exact") -> System:
    """A system by name, ready for batches of `rows` rows. The caller holds `matmul_precision(precision)`.

    torch compiles for one shape: the caller resets dynamo before it builds for another (`forget_compiled`).
    """
    if name == "dpiframe":
        return dpiframe(w, rows, precision, device, buckets=buckets)
    if name not in SYSTEMS:
        raise ValueError(f"system: got {name!r}, expected one of {', '.join(SYSTEMS)}")
    dtype = torch.bfloat16 if precision in ("bf16", "fp8") else torch.float32  # the least that torch models compute in
    if name in ("eager", "stacked-eager"):
        return _called(Model(w, TablePerField if name == "eager" else Stacked, dtype).eval(), rows, w, device, compiled=False)
    captured = name.endswith("-captured") and device.type == "cuda"
    mode = "default" if device.type == "cpu" else "max-autotune-no-cudagraphs" if captured else "max-autotune"
    wrap = _captured if captured else _called
    if name.startswith("fbgemm"):
        return wrap(_table_batched(w, rows, dtype, mode), rows, w, device)
    system = wrap(_compiled(Model(w, Stacked, dtype).eval(), mode), rows, w, device)
    return replace(system, notes={**system.notes, **_fewer_products()})


def _fewer_products() -> dict[str, object]:
    """What the records of compiled systems say if Inductor was told to choose among fewer products than it could."""
    chosen = os.environ.get("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS")
    return {"products": chosen} if chosen else {}


def forget_compiled() -> None:
    """Before another shape: else dynamo would compile for dynamic shapes. Inductor's own caches of tuned kernels stay."""
    torch._dynamo.reset()


def golden(w: Workload) -> Golden:
    """Golden rows by the eager model in strict float32: the source model that all systems are held against."""
    (block,) = id_blocks(w.schema, 64, 1, seed=99)
    return Golden(block, reference_scores(w, block))


def reference_scores(w: Workload, block: RowBlock) -> np.ndarray:
    """float32[rows, 1] of the source model in strict float32."""
    device = next(iter(w.tables.values())).device
    with torch.inference_mode(), matmul_precision("fp32"):
        return Model(w, TablePerField, torch.float32)(torch.from_numpy(wide_ids(block)).long().to(device)).cpu().numpy()


def dpiframe(
    w: Workload,
    rows: int,
    precision: str,
    device: torch.device,
    *,
    buckets: str = "exact",
    lanes: int = 1,
) -> System:
    """The engine through `Engine.submit`, as the service calls it. buckets: "exact": `rows`; "default": as serving."""
    most = max(rows, 64)  # the golden rows
    options = EngineOptions(
        max_batch_rows=4096 if buckets == "default" else most,
        buckets=() if buckets == "default" else tuple(sorted({rows, most})),
        lanes=lanes,
    )
    engine = Engine(w.bundle(golden(w)), str(device), precision, options)
    warm = engine.warmup()
    kept = next((c for c in warm.calibrations if c.bucket >= rows), None)
    notes = {"program": kept.program, "program_gain": round(kept.gain, 3)} if kept else {}
    return System(engine.submit, engine.close, engine.replay_us, notes=notes)


def _called(compute: Compute, rows: int, w: Workload, device: torch.device, *, compiled: bool = True) -> System:
    """ids in one copy from pinned memory into a fixed buffer, one call, scores back into pinned memory."""
    if device.type == "cpu":

        def score_on_cpu(block: RowBlock) -> np.ndarray:
            return compute(torch.from_numpy(wide_ids(block))).numpy()

        return System(score_on_cpu, first_op_s=lambda block: _seconds(lambda: score_on_cpu(block)))
    pinned, ids, out = _buffers(rows, w, device)
    if compiled:  # torch's own CUDA graphs copy an input into a buffer of theirs unless its address is known to stay
        torch._dynamo.mark_static_address(ids, guard=False)
    staging, result, stream = pinned.numpy(), out.numpy(), torch.cuda.current_stream()

    def put(block: RowBlock) -> None:
        staging[:] = wide_ids(block)
        ids.copy_(pinned, non_blocking=True)

    def finish() -> None:
        out.copy_(compute(ids), non_blocking=True)
        stream.synchronize()

    def score(block: RowBlock) -> np.ndarray:
        put(block)
        finish()
        return result.copy()

    def first_op_s(block: RowBlock) -> float:
        put(block)
        stream.synchronize()
        return _seconds(finish)

    return System(score, first_op_s=first_op_s)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _captured(compute: Compute, rows: int, w: Workload, device: torch.device) -> System:
    """The same with both copies in one CUDA graph captured by hand: what a good engineer builds."""
    pinned, ids, out = _buffers(rows, w, device)
    staging, result = pinned.numpy(), out.numpy()

    def work() -> None:
        ids.copy_(pinned, non_blocking=True)
        out.copy_(compute(ids), non_blocking=True)

    graph = Captured(work)

    def score(block: RowBlock) -> np.ndarray:
        staging[:] = wide_ids(block)
        graph()
        return result.copy()

    return System(score, graph.close, lambda block: graph.device_us())


def _buffers(rows: int, w: Workload, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pinned ids, ids on the device, pinned scores."""
    fields = len(w.schema.features)
    pinned = torch.zeros(rows, fields, dtype=torch.int32, pin_memory=True)
    return pinned, torch.zeros(rows, fields, dtype=torch.int32, device=device), torch.zeros(rows, 1, pin_memory=True)


def _compiled(model: Callable[[torch.Tensor], torch.Tensor], mode: str) -> Compute:
    compiled = torch.compile(model, mode=mode)
    if mode != "max-autotune":
        return compiled

    def compute(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the last call's output has been read
        return compiled(x)

    return compute


def _table_batched(w: Workload, rows: int, dtype: torch.dtype, mode: str) -> Compute:
    """FBGEMM for all lookups, first-order terms included (one launch of mixed dims beats two), then the compiled dense part."""
    fields, dims = len(w.schema.features), sum(t.shape[1] for t in w.embedding_tables)
    batch = TableBatch([*w.embedding_tables, *w.first_order_tables], rows, dtype)
    model = Model(w, None, dtype).eval()
    first_order = bool(w.first_order_tables)

    def dense(looked_up: torch.Tensor) -> torch.Tensor:
        wide = looked_up[:, dims::4][:, :fields] if first_order else None
        return model.dense_part(looked_up[:, :dims], wide)

    compiled = _compiled(dense, mode)
    if not first_order:
        return lambda ids: compiled(batch(batch.indices(ids)))
    # The same ids once more for the first-order tables, still in the one kernel that reorders them.
    return lambda ids: compiled(batch(ids.t().expand(2, fields, rows).reshape(-1)))
