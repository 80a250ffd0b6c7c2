"""What `dpiframe plan --measure` does: a plan's tables put where it says, and its lookup run on the device at hand."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deployments.cli.tables.plan_command import Plan, trace_blocks
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.bundle.encoding_files import read_encoding
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.row_counts import RowCounts
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.errors import InputError
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.machine.device_name import target_device
from dpiframe_core.models.model_graph import model_graph
from dpiframe_core.operators.lookup_time import lookup_us

_BATCHES = 32


def measured(plan: Plan, bundle: Path, trace: Path | None, batch: int, device: str, ahead_mib: float = 256) -> str:
    """A line for people: the time of a lookup of `batch` rows of the trace, or of such as the plan took for given.

    Raises:
        InputError: a plan for several GPUs on a GPU, or no such device. Unavailable: the host's memory does not hold its part.
    """
    target = target_device(device)
    if target.type == "cuda" and plan.placement.gpus > 1:
        got = f"a plan for {plan.placement.gpus} GPUs"
        raise InputError("--measure", got, "one for a single GPU: warm rows lie in the memory of other processes")
    read = read_bundle(bundle)
    if trace is None:
        blocks = [drawn_block(plan.schema, plan.counts, batch, seed) for seed in range(_BATCHES)]
    else:
        blocks = list(itertools.islice(batches_of(trace_blocks(read_encoding(bundle), trace), batch), _BATCHES))
    home = Home(plan.placement, "measured", None, int(ahead_mib * 2**20))
    store = EmbeddingStore(plan.schema, read.tables, target, read.scales, home)
    try:
        us = lookup_us(fuse(model_graph(read)), plan.schema, store, blocks)
    finally:
        store.close()
    if target.type == "cpu":
        return (
            f"measured on cpu: {us:,.1f} us; it reads rows where the bundle's files are mapped, and the prediction is of a GPU"
        )
    predicted = max(plan.links) * batch * 1e6
    return f"measured on {target}: {us:,.1f} us, launch and latency included; {us / predicted:.1f} times the predicted"


def drawn_block(schema: FeatureSchema, counts: RowCounts, rows: int, seed: int) -> RowBlock:
    """Rows of one context that read as the counts tell."""
    rng = np.random.default_rng(seed)
    block = RowBlock.allocate(schema.block_layout, rows)
    upto = {id(own): np.cumsum(own) for own in counts.tables.values()}
    for f in schema.features:
        name = f.table or f.first_order_table
        if f.is_id and name is not None:
            ends = upto[id(counts.tables[name])]
            column = block.column(schema.columns[f.name])
            column[:] = np.searchsorted(ends, rng.integers(0, ends[-1], column.shape), side="right")
    return block


def batches_of(blocks: Iterator[RowBlock], rows: int) -> Iterator[RowBlock]:
    """The blocks' rows in batches of so many; if there are fewer, again from the first."""
    held: list[RowBlock] = []
    found = 0
    for block in blocks:
        at = 0
        while at < block.rows:
            part = block.part(at, min(block.rows, at + rows - found))
            held.append(part)
            found, at = found + part.rows, at + part.rows
            if found == rows:
                yield _joined(held, rows)
                held, found = [], 0
    if held and found < rows:
        whole = _joined(held, found)
        again = itertools.repeat(whole, -(-rows // found))
        yield _joined(list(again), found * -(-rows // found)).part(0, rows)


def _joined(blocks: list[RowBlock], rows: int) -> RowBlock:
    made = RowBlock.allocate(blocks[0].layout, rows, sum(b.contexts for b in blocks))
    made.fill(blocks)
    return made
