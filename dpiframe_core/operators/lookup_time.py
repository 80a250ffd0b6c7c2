"""The time of a model's lookups alone, of tables as a store has them, on its device."""

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import Graph
from kernels.cpu.lookup import PackedLookup
from kernels.lookup.batch_header import HEADER_WORDS, HeaderWord
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.mapped_lookup import MappedLookup
from kernels.lookup.plan import Batch, LookupPlan
from kernels.runtime.state import STATE_WORDS, StateWord

_TIMES = 5


def lookup_us(graph: Graph, schema: FeatureSchema, store: EmbeddingStore, blocks: Sequence[RowBlock]) -> float:
    """Microseconds of a batch's lookups in the mean over blocks of equally many rows; the median of five times. Rows that only
    files hold have been read before.

    Raises:
        TooLarge, Overloaded: of the blocks together they are more than there are slots for.
    """
    plans = [plan_lookup(n, schema) for n in graph.nodes if n.op == "lookup"]
    with leased(store.ahead, blocks) as ready:
        return (_on_gpu if store.device.type == "cuda" else _on_cpu)(plans, store, ready)


def _on_cpu(plans: Sequence[LookupPlan], store: EmbeddingStore, blocks: Sequence[RowBlock]) -> float:
    if store.mapped:
        own: Sequence[MappedLookup | PackedLookup] = [
            MappedLookup(p, store.tables, store.scales, spares=store.spares) for p in plans
        ]
    else:
        own = [PackedLookup(p, store.tables, store.scales) for p in plans]
    times = []
    for _ in range(1 + _TIMES):
        start = time.perf_counter()
        for b in blocks:
            for lookup in own:
                lookup.read(b)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e6 / len(blocks)


def _on_gpu(plans: Sequence[LookupPlan], store: EmbeddingStore, blocks: Sequence[RowBlock]) -> float:
    """All blocks' launches in one graph, ids in pinned memory: a launch's own time, without that of Python."""
    if store.descriptors is None:
        raise ValueError("store: got no descriptors, expected those of a GPU's tables")
    device, rows = store.device, blocks[0].rows
    with torch.cuda.device(device), torch.inference_mode():
        own = [DeviceLookup(store.placed(p), store.descriptors, torch.float32) for p in plans]
        batches = [_pinned(b) for b in blocks]
        state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        state[StateWord.GENERATION] = store.generation
        outs = [torch.empty(rows, -(-p.x_width // 8) * 8, device=device) for p in plans]
        total = torch.empty(rows, 1, device=device)

        def launch(batch: Batch) -> None:
            for lookup, x in zip(own, outs, strict=True):
                lookup(batch, rows, x, total, state)

        launch(batches[0])  # compiled now
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for batch in batches:
                launch(batch)
        times = []
        for _ in range(1 + _TIMES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
        graph.reset()
    return statistics.median(times[1:]) * 1e3 / len(blocks)


def _pinned(block: RowBlock) -> Batch:
    header = torch.zeros(HEADER_WORDS, dtype=torch.int32)
    header[HeaderWord.STAGED_ROWS], header[HeaderWord.STAGED_CONTEXTS] = block.rows, block.contexts
    own = block.request_of_row, block.context_ids, block.candidate_ids, block.context_dense, block.candidate_dense
    arrays = *own, block.carried(block.rows)
    each = (header, *map(torch.from_numpy, map(np.ascontiguousarray, arrays)))
    return Batch(*(t.pin_memory() for t in each))
