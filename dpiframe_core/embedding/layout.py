"""Turns a graph's lookup node into a `LookupPlan`: which id columns of a `RowBlock` read which tables, landing where."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from dpiframe_core.features.schema import Categorical, FeatureSchema
from dpiframe_core.graph.graph import Node, Source
from kernels.lookup.plan import ALWAYS_ROW_0, NO_NUMBER, IdColumn, Kind, LookupPlan, Slot, TableShape

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


def table_dtype(name: str) -> torch.dtype:
    """The torch dtype of a schema's table dtype."""
    return _DTYPES[name]


def plan_lookup(node: Node, schema: FeatureSchema, firsts: Sequence[int] | None = None) -> LookupPlan:
    """The plan of a `lookup` node, made once, ahead of all batches. Tables are numbered in the schema's order.

    firsts: the first column of each output (but the total) in the matrix that it writes; None: one output behind the other.
    """
    columns: list[IdColumn] = []
    layout = schema.block_layout
    x_slots: list[Slot] = []
    outputs = node.attrs.outputs_of_concat()
    if firsts is None:
        firsts = [0, *accumulate(sum(s.width for s in sources) for sources in outputs)][: len(outputs)]
    for sources, first in zip(outputs, firsts, strict=True):
        x_slots += _slots(sources, schema, columns, first)
    return LookupPlan(
        tables=tuple(TableShape(t.rows, t.dim, table_dtype(t.dtype)) for t in schema.tables),
        x_slots=tuple(x_slots),
        total_slots=tuple(_slots(node.attrs.total, schema, columns, 0)),
        columns=tuple(columns),
        context_ids=layout.context_ids,
        candidate_ids=layout.candidate_ids,
        context_numbers=layout.context_dense,
        candidate_numbers=layout.candidate_dense,
    )


def _slots(sources: Sequence[Source], schema: FeatureSchema, columns: list[IdColumn], out: int) -> list[Slot]:
    """The slots of one output, which begins at column `out`; appends the id columns they read."""
    number_of_table = {t.name: i for i, t in enumerate(schema.tables)}
    slots: list[Slot] = []
    for source in sources:
        feature, place = schema.feature(source.feature), schema.columns[source.feature]
        context = place.section.startswith("context")
        sources_of = [-1 - (place.start + i) if context else place.start + i for i in range(place.width)]
        pads = isinstance(feature, Categorical) and feature.max_values > 1
        if source.table is None and feature.is_id:  # the mask of a sequence
            of_table = number_of_table[feature.table or ""]
            slots += [Slot(Kind.MASK, 1, out + i, len(columns) + i, 1) for i in range(place.width)]
            columns += [IdColumn(s, of_table, feature.oov_id or 0, pads) for s in sources_of]
        elif source.table is None:
            slots.append(Slot(Kind.COPY, 1, out, number=sources_of[0]))
        elif not feature.is_id:
            slots.append(Slot(Kind.SCALE, source.width, out, len(columns), 1, number=sources_of[0]))
            columns.append(IdColumn(ALWAYS_ROW_0, number_of_table[source.table], 0))
        else:
            first, dim = len(columns), schema.table(source.table).dim
            pooling = schema.pooling(feature.name, source.table)
            if pooling == "none":
                slots += [Slot(Kind.GATHER, dim, out + i * dim, first + i, 1) for i in range(place.width)]
            else:
                mean, largest = ((pooling == how and place.width > 1) for how in ("mean", "max"))
                slots.append(Slot(Kind.GATHER, dim, out, first, place.width, NO_NUMBER, mean, largest))
            columns += [IdColumn(s, number_of_table[source.table], feature.oov_id or 0, pads) for s in sources_of]
        out += source.width
    return slots
