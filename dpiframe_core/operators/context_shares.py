"""Which columns of a lookup are worked on but once a context. Multiplied: those of its features, in layers that read the lookup
itself. Written: a history that one attention alone reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import Graph, Node, Source
from dpiframe_core.graph.waves import CROSS_LAYERS, MAX_JOBS
from kernels.waves.wave_jobs import chunk_columns

SHARED_ROWS = 128  # of a bucket, from which on it is tried: a wave of few rows waits for weights, whoever multiplies them
_LEAST = 8  # the part of a lookup's columns, one over it, that is worth a program of its own
_MOST_IDS = 8  # of a bag beside them: longer ones may be cut into parts, which know no contexts


@dataclass(frozen=True, slots=True)
class ContextShares:
    """lookup: the node. columns: of its first output, [first, end), all of a context's features. layers: members of waves that
    read this output, and compute what these columns add to their products once a context.
    """

    lookup: str
    columns: tuple[int, int]
    layers: frozenset[str]


def context_shares(waves: Graph, schema: FeatureSchema, dtype: torch.dtype) -> ContextShares | None:
    """Of a graph of `group_waves`: of the features of a context that lie side by side, the most columns, in whole chunks of
    products of `dtype`. None where they are few or all, or no layer reads them.
    """
    lookups = [n for n in waves.nodes if n.op == "lookup"]
    if len(lookups) != 1 or lookups[0].attrs.splits or not lookups[0].attrs.concat:
        return None
    (lookup,) = lookups
    if any(_pools(schema, source, _MOST_IDS) for source in (*lookup.attrs.concat, *lookup.attrs.total)):
        return None
    chunk = chunk_columns(dtype)
    whole = [(-(-first // chunk) * chunk, end // chunk * chunk) for first, end in _runs(lookup, schema)]
    first, end = max(whole, key=lambda run: run[1] - run[0], default=(0, 0))
    width = waves.widths[lookup.outputs[0]]
    if (end - first) * _LEAST < width or end - first == width:
        return None
    layers: set[str] = set()
    for wave in waves.nodes:
        jobs = [m for m in wave.attrs.members if m.op != "head"]
        reading = [m.name for m in jobs if m.op in ("linear", *CROSS_LAYERS) and m.inputs[-1] == lookup.outputs[0]]
        layers.update(reading[: MAX_JOBS - len(jobs)] if wave.op == "wave" else ())
    return ContextShares(lookup.name, (first, end), frozenset(layers)) if layers else None


def _pools(schema: FeatureSchema, source: Source, most: int) -> bool:
    """Whether it pools more than so many ids."""
    several = schema.columns[source.feature].width > most and source.table is not None
    return several and schema.pooling(source.feature, source.table) != "none"


def _runs(lookup: Node, schema: FeatureSchema) -> Iterator[tuple[int, int]]:
    """[first, end) of the columns of a context's features that lie side by side."""
    first = column = 0
    for source in lookup.attrs.concat:
        if not schema.columns[source.feature].section.startswith("context"):
            yield first, column
            first = column + source.width
        column += source.width
    yield first, column


def context_columns(graph: Graph, lookup: Node, schema: FeatureSchema) -> tuple[tuple[int, int], ...]:
    """[first, end) of the keys and the mask that an attention reads in the lookup's first output; none where some of them are
    a candidate's or of numbers, or not all of an unpooled feature's, or anything else reads that output.
    """
    readers = graph.consumers().get(lookup.outputs[0], [])
    if lookup.attrs.splits or [r.op for r in readers] != ["attention"] or lookup.outputs[0] == graph.output:
        return ()
    at = readers[0].attrs.attended
    assert at is not None
    wanted = [(first, first + at.length * dim) for first, dim in zip(at.keys, at.dims, strict=True)]
    wanted += [(at.mask, at.mask + at.length)] if at.mask >= 0 else []
    others = [(first, first + count) for first, _, count in at.kept]
    others += [(first, first + dim) for first, dim in zip(at.queries, at.dims, strict=True)]
    column = 0
    for source in lookup.attrs.concat:
        end = column + source.width
        whole = any(first <= column and end <= last for first, last in wanted)
        own = schema.columns[source.feature].section != "context_ids" or _pools(schema, source, 1)
        if own or not whole:
            others.append((column, end))
        column = end
    return () if any(a < d and c < b for a, b in wanted for c, d in others) else tuple(wanted)
