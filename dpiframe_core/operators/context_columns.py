"""Which columns of a lookup are written but once a context: a history that one attention alone reads. Knows no tensors."""

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import Graph, Node


def context_columns(graph: Graph, lookup: Node, schema: FeatureSchema) -> tuple[tuple[int, int], ...]:
    """[first, end) of the keys and the mask that an attention reads in the lookup's first output; none where some of them are
    a candidate's, or anything else reads that output.
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
        if not schema.columns[source.feature].section.startswith("context"):
            others.append((column, column + source.width))
        column += source.width
    return () if any(a < d and c < b for a, b in wanted for c, d in others) else tuple(wanted)
