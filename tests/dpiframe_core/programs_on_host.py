"""A model's programs for a GPU, run without one: kernels by `tests.kernels.host_cuda`, what torch computes on the CPU. Every
program is planned, given its buffers and launched as in a lane of a GPU; nothing is captured or timed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine import program as program_module
from dpiframe_core.features.row_block import Floats, RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import Graph
from dpiframe_core.operators.executor import execute
from dpiframe_core.operators.workspace import Workspace, done_words
from kernels.attention import attention, attention_mma, field_attention
from kernels.dense import activation, cross_epilogue, head, linear
from kernels.interaction import cin, cin_wgmma, cross, dot, fm, tower
from kernels.lookup import embedding
from kernels.lookup.batch_header import HeaderWord
from kernels.lookup.descriptors import whole
from kernels.lookup.plan import Batch
from kernels.recurrent import recurrence
from kernels.runtime.state import STATE_WORDS
from kernels.waves import chain, wave
from tests.kernels.host_cuda import put_under

CPU = torch.device("cpu")
LAUNCHERS = (
    attention, attention_mma, field_attention, activation, cross_epilogue, head, linear, cin, cin_wgmma, cross, dot, fm, tower,
    embedding, recurrence, chain, wave,
)  # fmt: skip


def put_programs_under(monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> None:
    """Has `scores_by_program` run kernels here, as if this were an H200 without Triton."""
    for module in LAUNCHERS:
        put_under(monkeypatch, module, run_folder)
    for user in (linear, program_module):
        monkeypatch.setattr(user, "triton_builds", lambda: False)


def scores_by_program(
    graph: Graph,
    schema: FeatureSchema,
    tables: Mapping[str, torch.Tensor],
    dense: Mapping[str, torch.Tensor],
    precision: str,
    block: RowBlock,
    bucket: int,
) -> dict[str, Floats]:
    """By name, the scores that each program of a fused graph has for a block's rows, in a bucket of so many."""
    store = EmbeddingStore(schema, tables, CPU)
    store.descriptors = whole(store.tables, store.scales, CPU)
    programs = program_module.cuda_programs(graph, schema, store, dense, precision, "auto", 4)
    fitting = [p for p in programs if p.operators.fits(bucket)]
    return {p.name: _scores(p, programs, _staged(block, bucket), block.rows, bucket) for p in fitting}


def _staged(block: RowBlock, bucket: int) -> Batch:
    """As `engine.staging` has rows in pinned memory."""
    memory = torch.zeros(block.layout.offsets(bucket, bucket)[-1], dtype=torch.uint8)
    staged = RowBlock.over(memory.numpy(), block.layout, bucket, bucket)
    rows = staged.fill([block])
    staged.header[HeaderWord.STAGED_ROWS : HeaderWord.STAGED_CONTEXTS + 1] = rows, block.contexts
    staged.request_of_row[rows:] = -1
    sections = staged.request_of_row, staged.context_ids, staged.candidate_ids, staged.context_dense, staged.candidate_dense
    carried = np.full((bucket, staged.carried(0).shape[1]), 0xA5, np.uint8)
    carried[:rows] = staged.carried(rows)
    return Batch(*map(torch.from_numpy, (staged.header, *sections, carried)))


def _scores(
    program: program_module.CudaProgram, programs: Sequence[program_module.CudaProgram], batch: Batch, rows: int, bucket: int
) -> Floats:
    state, done = torch.zeros(STATE_WORDS, dtype=torch.int32), torch.zeros(done_words(bucket), dtype=torch.int32)
    workspace = Workspace(batch=batch, state=state, done=done)
    for one in programs:
        one.operators.allocate(workspace, bucket)
    values, output = workspace.values, program.graph.output
    tasks, last = program.graph.widths[output], program.graph.producers()[output]
    if (last.attrs.members or (last,))[-1].op == "head":
        values[output] = torch.full((bucket, tasks), torch.nan)
    with torch.inference_mode():
        execute(program.plan, program.operators.for_buffers(workspace, bucket), values)
    return values[output][:rows, :tasks].float().numpy()
