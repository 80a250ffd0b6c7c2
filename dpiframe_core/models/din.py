"""DIN: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", 2018, equation 3 and figure 2."""

from collections.abc import Sequence

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import DIN, TargetAttention
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Attended, Graph
from dpiframe_core.graph.interactions import attention
from dpiframe_core.models.layers import activation_kind, click_scores, mlp


def din(schema: FeatureSchema, p: DIN, tasks: int) -> Graph:
    """score = sigmoid(MLP of all embeddings, with the interest sum_l a(q, k_l) k_l in the place of each sequence)."""
    g = GraphBuilder(schema)
    _check(schema, p.attention)
    values = {f.name: g.lookup(f.name, f.table, f"emb.{f.name}", "embedding") for f in schema.features}
    values |= {_mask(u): g.mask(u.sequences[0], _mask(u), "embedding") for u in p.attention if u.masked}
    x, spans = g.concat(list(values.values()), "x", "embedding"), {name: g.width(v) for name, v in values.items()}
    for i, unit in enumerate(p.attention):
        x, spans = _interest(g, x, spans, unit, f"attention.{i}")
    return g.finish(click_scores(g, [mlp(g, x, p.hidden_units, p.activation)], [], tasks))


def _interest(g: GraphBuilder, x: str, spans: dict[str, int], unit: TargetAttention, prefix: str) -> tuple[str, dict[str, int]]:
    """x with the unit's interest in the place of its sequences and without its mask, and its columns by feature."""
    dims = [spans[name] for name in unit.targets]
    out = {name: width for name, width in spans.items() if name != _mask(unit)}
    out |= dict(zip(unit.sequences, dims, strict=True))
    at, to = _offsets(spans), _offsets(out)
    kept: list[tuple[int, int, int]] = []
    for name, width in out.items():
        if name in unit.sequences:
            continue
        first, put, count = kept[-1] if kept else (0, 0, 0)
        if count and (at[name], to[name]) == (first + count, put + count):
            kept[-1] = (first, put, count + width)
        else:
            kept.append((at[name], to[name], width))
    attended = Attended(
        length=g.schema.feature(unit.sequences[0]).max_values,
        dims=tuple(dims),
        queries=tuple(at[name] for name in unit.targets),
        keys=tuple(at[name] for name in unit.sequences),
        pooled=tuple(to[name] for name in unit.sequences),
        mask=at[_mask(unit)] if unit.masked else -1,
        kept=tuple(kept),
        softmax=unit.softmax,
        output=unit.output_activation,
    )
    kind, slope = activation_kind(unit.activation)
    return attention(g, x, attended, unit.hidden_units, prefix, "attention", activation=kind, slope=slope), out


def _offsets(spans: dict[str, int]) -> dict[str, int]:
    first, at = {}, 0
    for name, width in spans.items():
        first[name], at = at, at + width
    return first


def _mask(unit: TargetAttention) -> str:
    return f"mask.{unit.sequences[0]}"


def _check(schema: FeatureSchema, units: Sequence[TargetAttention]) -> None:
    """Targets and sequences exist and have equal dims, a unit's sequences one length; every sequence belongs to one unit.

    Raises:
        ValueError: they do not.
    """
    known = {f.name: f for f in schema.features}
    for unit in units:
        for target, sequence in zip(unit.targets, unit.sequences, strict=True):
            for key, name in (("targets", target), ("sequences", sequence)):
                if name not in known or known[name].table is None or (known[name].pooling == "none") != (key == "sequences"):
                    rule = "a feature with a table" + (" and pooling 'none'" if key == "sequences" else " that is no sequence")
                    raise ValueError(f"attention.{key}: got {name!r}, expected {rule}")
            dims = [schema.table(known[name].table or "").dim for name in (target, sequence)]
            if dims[0] != dims[1]:
                raise ValueError(
                    f"attention: got {target} of dim {dims[0]} and {sequence} of dim {dims[1]}, expected equal ones"
                )
        lengths = {known[name].max_values for name in unit.sequences}
        if len(lengths) != 1:
            raise ValueError(f"attention.sequences: got lengths {sorted(lengths)}, expected one")
    used = [name for unit in units for name in unit.sequences]
    for f in schema.features:
        if f.pooling == "none" and used.count(f.name) != 1:
            raise ValueError(f"features.{f.name}: got {used.count(f.name)} attention units that read it, expected 1")
