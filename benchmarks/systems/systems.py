"""The systems that are compared, by name. Each takes a batch from host memory to scores in host memory, as a server would."""

import os
from collections.abc import Callable
from dataclasses import replace
from mmap import mmap

import numpy as np
import torch

from benchmarks.systems.fbgemm import TableBatch
from benchmarks.systems.launches import dependent_launches
from benchmarks.systems.names import OURS, SYSTEMS
from benchmarks.systems.system import System
from benchmarks.systems.torch_calls import Compute, called, captured, mapped
from benchmarks.workloads.blocks import drawn_blocks
from benchmarks.workloads.inputs import PeerInputs
from benchmarks.workloads.paper import FOUR, Model
from benchmarks.workloads.workload import SOURCE, Form, Workload
from dpiframe_core.bundle.bundle import Golden
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import matmul_precision

_GOLDEN_ROWS, _GOLDEN_CONTEXTS = 64, 4


def build(
    name: str,
    w: Workload,
    rows: int,
    precision: str,
    device: torch.device,
    *,
    contexts: int = 1,
    buckets: str = "exact",
) -> System:
    """A system by name, ready for batches of `rows` rows of `contexts`. The caller holds `matmul_precision(precision)`.

    torch compiles for one shape: the caller resets dynamo before it builds for another (`forget_compiled`).
    """
    if name in OURS:
        return dpiframe(w, rows, precision, device, buckets=buckets, in_place=name == "dpiframe-in-place")
    if name not in SYSTEMS:
        raise ValueError(f"system: got {name!r}, expected one of {', '.join(SYSTEMS)}")
    dtype = torch.bfloat16 if precision in ("bf16", "fp8") else torch.float32  # the least that torch models compute in
    inputs = PeerInputs.of(w.schema, rows, contexts)
    form = Form(stacked=name != "eager", dtype=dtype, exact=precision == "fp32")
    if name in ("eager", "stacked-eager"):
        return called(w.module(form), inputs, rows, device, compiled=False)
    by_hand = name.endswith(("-captured", "-mapped")) and device.type == "cuda"
    mode = "default" if device.type == "cpu" else "max-autotune-no-cudagraphs" if by_hand else "max-autotune"
    lookup, model = _table_batched(w, rows, dtype) if name.startswith("fbgemm") else (None, w.module(form))
    if not by_hand:
        compute = _compiled(model, mode)
        system = called((lambda ids: compute(lookup(ids))) if lookup else compute, inputs, rows, device)
        return replace(system, notes=_fewer_products())
    store = torch.compile(storing(model), mode=mode)
    call = mapped if name.endswith("-mapped") else captured
    system = call((lambda out, ids: store(out, lookup(ids))) if lookup else store, inputs, rows, device)
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
    contexts = _GOLDEN_CONTEXTS if w.has_contexts else 1
    (block,) = drawn_blocks(w.schema, _GOLDEN_ROWS, 1, contexts=contexts, seed=99)
    return Golden(block, reference_scores(w, [block])[0])


def reference_scores(w: Workload, blocks: list[RowBlock]) -> list[np.ndarray]:
    """float32[rows, 1] of each batch by the source model in strict float32."""
    source = w.module(SOURCE)
    with torch.inference_mode(), matmul_precision("fp32"):
        given = [PeerInputs.of(w.schema, b.rows, b.contexts).tensors(b, w.device) for b in blocks]
        return [source(*tensors).cpu().numpy() for tensors in given]


def dpiframe(
    w: Workload,
    rows: int,
    precision: str,
    device: torch.device,
    *,
    buckets: str = "exact",
    lanes: int = 1,
    in_place: bool = False,
) -> System:
    """The engine through `Engine.submit`, as the service calls it.

    buckets: "exact": `rows`; "default": as serving. in_place: batches lie in page-locked memory, as those of an ingress do.
    """
    most = max(rows, _GOLDEN_ROWS)
    options = EngineOptions(
        max_batch_rows=4096 if buckets == "default" else most,
        buckets=() if buckets == "default" else tuple(sorted({rows, most})),
        lanes=lanes,
    )
    engine = Engine(w.bundle(golden(w)), str(device), precision, options)
    warm = engine.warmup()
    kept = next((c for c in warm.calibrations if c.bucket >= rows), None)
    notes: dict[str, object] = {}
    if kept:
        notes = {"program": kept.program, "program_gain": round(kept.gain, 3), "programs_us": dict(kept.microseconds)}
        notes["launches"] = dependent_launches(engine.program(kept.bucket).graph)
    if not in_place:
        return System(engine.submit, engine.close, engine.replay_us, notes=notes)
    held: dict[RowBlock, RowBlock] = {}  # their copies, made before anything is timed

    def score(block: RowBlock) -> np.ndarray:
        if block not in held:
            held[block] = locked_block(engine, block)
        return engine.submit(held[block])

    return System(score, engine.close, engine.replay_us, notes=notes)


def locked_block(engine: Engine, block: RowBlock) -> RowBlock:
    """The same rows in memory that an engine has locked, as it does with an ingress's, with room behind them as there."""
    layout, most, size = block.layout, engine.max_batch_rows, block.layout.offsets(block.rows, block.contexts)[-1]
    memory = np.frombuffer(mmap(-1, size + layout.offsets(most, most)[-1]), np.uint8)
    engine.lock_pages(memory)
    copy = RowBlock.formatted(memory[:size], layout, block.rows, block.contexts)
    copy.fill((block,))
    return copy


def storing(model: Compute) -> Callable[..., None]:
    """The model with the scores' place among its arguments, so that its last kernel writes there. Captured and mapped systems
    compile the same: the second finds what Inductor made for the first.
    """

    def store(out: torch.Tensor, *inputs: torch.Tensor) -> None:
        out.copy_(model(*inputs))

    return store


def _compiled(model: Compute, mode: str) -> Compute:
    compiled = torch.compile(model, mode=mode)
    if mode != "max-autotune":
        return compiled

    def compute(*inputs: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the last call's output has been read
        return compiled(*inputs)

    return compute


def _table_batched(w: Workload, rows: int, dtype: torch.dtype) -> tuple[Compute, Compute]:
    """FBGEMM for all lookups, first-order terms included (one launch of mixed dims beats two), and the dense part behind it.

    Raises:
        ValueError: the model is not one of those that take a matrix of embeddings.
    """
    if not isinstance(w.architecture, FOUR):
        raise ValueError(f"fbgemm: got {w.name}, expected one of Wide&Deep, DeepFM, DCN and DCN-V2")
    fields, dims = len(w.schema.features), sum(t.shape[1] for t in w.embedding_tables)
    batch = TableBatch([*w.embedding_tables, *w.first_order_tables], rows, dtype)
    model = Model(w, None, dtype).eval()
    first_order = bool(w.first_order_tables)

    def dense(looked_up: torch.Tensor) -> torch.Tensor:
        wide = looked_up[:, dims::4][:, :fields] if first_order else None
        return model.dense_part(looked_up[:, :dims], wide)

    if not first_order:
        return lambda ids: batch(batch.indices(ids)), dense
    # The same ids once more for the first-order tables, still in the one kernel that reorders them.
    return lambda ids: batch(ids.t().expand(2, fields, rows).reshape(-1)), dense
