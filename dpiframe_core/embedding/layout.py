"""Turns a graph's lookup node into a `LookupPlan`: which id columns of a `RowBlock` read which tables, landing where."""

from collections.abc import Sequence

import torch

from dpiframe_core.graph import Node, Source
from dpiframe_core.schema import Categorical, FeatureSchema, Numeric
from kernels.lookup_plan import ALWAYS_ROW_0, NO_NUMBER, IdColumn, Kind, LookupPlan, Slot, TableShape

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


def table_dtype(name: str) -> torch.dtype:
    """The torch dtype of a schema's table dtype."""
    return _DTYPES[name]


def plan_lookup(node: Node, schema: FeatureSchema) -> LookupPlan:
    """The plan of a `lookup` node, made once, ahead of all batches. Tables are numbered in the schema's order."""
    columns: list[IdColumn] = []
    layout = schema.block_layout
    return LookupPlan(
        tables=tuple(TableShape(t.rows, t.dim, table_dtype(t.dtype)) for t in schema.tables),
        x_slots=_slots(node.attrs.concat, schema, columns),
        total_slots=_slots(node.attrs.total, schema, columns),
        columns=tuple(columns),
        context_ids=layout.context_ids,
        candidate_ids=layout.candidate_ids,
        context_numbers=layout.context_dense,
        candidate_numbers=layout.candidate_dense,
    )


def _slots(sources: Sequence[Source], schema: FeatureSchema, columns: list[IdColumn]) -> tuple[Slot, ...]:
    """The slots of one output; appends the id columns they read."""
    number_of_table = {t.name: i for i, t in enumerate(schema.tables)}
    slots, out = [], 0
    for source in sources:
        feature, place = schema.feature(source.feature), schema.columns[source.feature]
        context = place.section.startswith("context")
        sources_of = [-1 - (place.start + i) if context else place.start + i for i in range(place.width)]
        if source.table is None:
            slots.append(Slot(Kind.COPY, 1, out, number=sources_of[0]))
        elif not feature.is_id:
            slots.append(Slot(Kind.SCALE, source.width, out, len(columns), 1, number=sources_of[0]))
            columns.append(IdColumn(ALWAYS_ROW_0, number_of_table[source.table], 0))
        else:
            mean = _pooling(feature, source.table) == "mean" and place.width > 1
            slots.append(Slot(Kind.GATHER, source.width, out, len(columns), place.width, NO_NUMBER, mean))
            pads = isinstance(feature, Categorical) and feature.max_values > 1
            columns += [IdColumn(s, number_of_table[source.table], feature.oov_id, pads) for s in sources_of]
        out += source.width
    return tuple(slots)


def _pooling(feature: Categorical | Numeric, table: str) -> str:
    if isinstance(feature, Categorical) and feature.first_order_pooling is not None and table == feature.first_order_table:
        return feature.first_order_pooling
    return feature.pooling
