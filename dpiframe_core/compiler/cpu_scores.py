"""The scores of a graph on encoded rows by the CPU's operators, with no more of its tables in memory than those rows read.

An engine on a CPU packs whole tables; of tables that fill the machine, an import would need their memory twice again.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.features.block_layout import IdSection
from dpiframe_core.features.row_block import Floats, RowBlock
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.schedule import breadth_first
from dpiframe_core.operators.cpu import CpuOperators

_PART = 1024
_IDS: tuple[IdSection, ...] = ("context_ids", "candidate_ids")
Tensors = Mapping[str, torch.Tensor]


def cpu_scores(
    graph: Graph, schema: FeatureSchema, tables: Tensors, dense: Tensors, block: RowBlock, scales: Tensors | None = None
) -> Floats:
    """float32[rows, tasks] of a graph before fusion; of its tables only the rows that `block` reads are touched."""
    kept = _kept(schema, block)
    own = {t.name: torch.from_numpy(np.minimum(kept[t.name], t.rows - 1)) for t in schema.tables if t.name in kept}
    few = {name: tables[name][own.get(name, ...)] for name in tables}  # of those that are made when asked for, one at a time
    narrowed = _narrowed(schema, few)
    lane, renumbered = cpu_lane(graph, narrowed, few, dense, scales), _renumbered(schema, narrowed, block, kept)
    starts = range(0, block.rows, _PART)
    return np.concatenate([lane.run([renumbered.part(i, min(i + _PART, block.rows))]).scores for i in starts])


def cpu_lane(graph: Graph, schema: FeatureSchema, tables: Tensors, dense: Tensors, scales: Tensors | None = None) -> CpuLane:
    """Of whole tables, which it packs."""
    fused = fuse(graph)
    operators = CpuOperators(fused, schema, EmbeddingStore(schema, tables, torch.device("cpu"), scales), dense)
    return CpuLane(operators, breadth_first(fused), schema.block_layout, fused)


def _kept(schema: FeatureSchema, block: RowBlock) -> dict[str, npt.NDArray[np.int64]]:
    """Table -> the ids that are read of it, ascending; tables that a feature reads by the same ids have the same ones."""
    root = {t.name: t.name for t in schema.tables}

    def first(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    features = [f for f in schema.features if f.is_id]
    for f in features:
        if f.table is not None and f.first_order_table is not None:
            root[first(f.first_order_table)] = first(f.table)
    found: dict[str, list[npt.NDArray[np.int64]]] = {}
    for f in features:
        found.setdefault(first(f.table or f.first_order_table or ""), []).append(_ids(schema, block, f).ravel())
    ids = {name: np.unique(np.concatenate([[0], *(a[a >= 0] for a in arrays)])) for name, arrays in found.items()}
    return {t.name: ids[first(t.name)] for t in schema.tables if first(t.name) in ids}


def _narrowed(schema: FeatureSchema, tables: Tensors) -> FeatureSchema:
    """Unchecked: stand-ins and buckets of the encoders lie beyond the fewer rows. The rows are encoded already."""
    features = tuple(f.model_copy(update={"oov_id": 0} if isinstance(f, Categorical) else {}) for f in schema.features)
    sizes = tuple(t.model_copy(update={"rows": len(tables[t.name])}) for t in schema.tables)
    return FeatureSchema.model_construct(features=features, tables=sizes)


def _renumbered(
    schema: FeatureSchema, narrowed: FeatureSchema, block: RowBlock, kept: Mapping[str, npt.NDArray[np.int64]]
) -> RowBlock:
    out = RowBlock.allocate(narrowed.block_layout, block.rows, block.contexts)
    out.request_of_row[:] = block.request_of_row
    out.context_dense[:], out.candidate_dense[:] = block.context_dense, block.candidate_dense
    sections: dict[str, npt.NDArray[np.int64]] = {section: block.wide_ids(section).astype(np.int64) for section in _IDS}
    for f in schema.features:
        if f.is_id:
            place, ids = schema.columns[f.name], _ids(schema, block, f)
            new = np.searchsorted(kept[f.table or f.first_order_table or ""], ids)
            columns = slice(place.start, place.start + place.width)
            sections[place.section][:, columns] = np.where(ids < 0, -1, new)
    for section in _IDS:
        if sections[section].shape[1]:
            out.set_ids(section, sections[section])
    return out


def _ids(schema: FeatureSchema, block: RowBlock, f: Feature) -> npt.NDArray[np.int64]:
    """int64[rows or contexts, width]; -1 where a list has no value."""
    place = schema.columns[f.name]
    section: IdSection = "context_ids" if place.section == "context_ids" else "candidate_ids"
    ids: npt.NDArray[np.int64] = block.wide_ids(section)[:, place.start : place.start + place.width].astype(np.int64)
    return ids
