"""Describes a bundle in text: tables and sizes, the op graph by module, and the plan level by level with streams and events."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.describe.plan_launches import operator_text
from dpiframe_core.features.schema import Categorical, Feature
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.graph import JOINED, Graph, Node
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.schedule import Plan, breadth_first
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.model_graph import model_graph


def describe(bundle: Bundle) -> str:
    """A page about a bundle, for people."""
    m = bundle.manifest
    unfused = model_graph(bundle)
    graph = place(fuse(unfused))
    operators = [n for n in graph.nodes if n.op != JOINED]
    plan = breadth_first(graph)
    dense = unfused.parameter_count
    return "\n\n".join(
        (
            f"{m.name} version {m.version}: {m.architecture.type} with {len(m.feature_schema.features)} features, "
            f"{dense:,} dense parameters, tasks {', '.join(m.tasks)}\n{bundle.path}",
            _tables(bundle),
            _features(m.feature_schema.features),
            f"Graph: {len(unfused.nodes)} operators, {len(operators)} after fusion\n{_graph(graph)}",
            f"Plan: {plan.policy}, {plan.streams} stream(s), {plan.events - 1} event(s) between them\n{_plan(graph, plan)}",
            f"Waves, one launch each, which a GPU runs instead where that is faster\n{_waves(group_waves(graph))}",
        )
    )


def _tables(bundle: Bundle) -> str:
    tables = bundle.manifest.feature_schema.tables
    rows = [(t.name, f"{t.rows:,}", str(t.dim), t.dtype, _size(t.bytes_used)) for t in tables]
    total = _size(sum(t.bytes_used for t in tables))
    return f"Tables: {len(tables)}, {total}\n" + _columns([("table", "rows", "dim", "dtype", "size"), *rows])


def _features(features: Iterable[Feature]) -> str:
    rows = []
    for f in features:
        how = f.encoder.type if isinstance(f, Categorical) else " ".join(t.type for t in f.transforms) or "as it is"
        how_many = "side by side" if f.pooling == "none" else f.pooling
        many = f"up to {f.max_values}, {how_many}" if f.max_values > 1 else ""
        rows.append((f.name, f.scope, f.kind, how, f.table or "", f.first_order_table or "", many))
    return "Features\n" + _columns([("feature", "scope", "kind", "encoding", "table", "first order", "values"), *rows])


def _graph(graph: Graph) -> str:
    rows = [("module", "operator", "op", "reads", "makes")]
    for module, nodes in groupby(sorted(graph.nodes, key=lambda n: _module_rank(graph, n)), key=lambda n: n.module):
        for i, n in enumerate(nodes):
            makes = ", ".join(f"{o}[{graph.widths[o]}]" for o in n.outputs)
            rows.append(("" if i else module, n.name, operator_text(n), ", ".join(n.inputs), makes))
    return _columns(rows)


def _module_rank(graph: Graph, node: Node) -> int:
    return next(i for i, n in enumerate(graph.nodes) if n.module == node.module)


def _waves(graph: Graph) -> str:
    rows = [("launch", "operators side by side", "modules")]
    for n in graph.nodes:
        if n.op != JOINED:
            rows.append((n.name, ", ".join(m.name for m in n.attrs.members or (n,)), n.module))
    return _columns(rows)


def _plan(graph: Graph, plan: Plan) -> str:
    rows = [("level", "stream", "operator", "waits for", "records")]
    recorded_by = {s.records: s.node for s in plan.steps if s.records is not None}
    last = -1
    for s in plan.steps:
        waits = ", ".join(f"event {e} ({recorded_by.get(e, 'start')})" for e in s.waits)
        records = "" if s.records is None else f"event {s.records}"
        rows.append((str(s.level) if s.level != last else "", str(s.stream), s.node, waits, records))
        last = s.level
    joined = ", ".join(f"event {e} ({recorded_by[e]})" for e in plan.joins)
    return _columns(rows) + (f"\n  at the end stream 0 waits for {joined}" if joined else "")


def _size(count: int) -> str:
    """Bytes with a binary unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart, indented by two."""
    used = [i for i in range(len(rows[0])) if any(r[i] for r in rows[1:])] if len(rows) > 1 else []
    width = {i: max(len(r[i]) for r in rows) for i in used}
    return "\n".join("  " + "  ".join(r[i].ljust(width[i]) for i in used).rstrip() for r in rows)
