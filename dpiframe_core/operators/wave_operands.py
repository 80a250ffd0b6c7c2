"""Gives waves and chains what their kernels take: jobs with weights, and the buffers of a launch."""

from collections.abc import Mapping, Sequence

import torch

from dpiframe_core.fusion.gates import SUMMED
from dpiframe_core.graph.chains import group_chain
from dpiframe_core.graph.graph import JOINED, Graph, Node
from dpiframe_core.graph.interactions import linear_params
from dpiframe_core.graph.waves import CROSS_LAYERS
from dpiframe_core.operators.context_shares import ContextShares
from dpiframe_core.operators.executor import Values
from dpiframe_core.operators.workspace import Workspace
from kernels.interaction.pairs import Pairs
from kernels.reference import folded_cross
from kernels.waves.chain import Chain
from kernels.waves.chain_links import ChainHead, ChainOperands, Link
from kernels.waves.wave import Wave
from kernels.waves.wave_jobs import CrossJob, FmJob, HeadOperands, Job, LinearJob, NormJob, Operands


def jobs_of(
    members: Sequence[Node],
    graph: Graph,
    dense: Mapping[str, torch.Tensor],
    scales: Mapping[str, float],
    shares: ContextShares | None = None,
) -> tuple[list[Job], torch.Tensor | None]:
    """What the members compute, and the bias of the head if they end in it. scales: of values in fp8, by name."""
    head = members[-1] if members[-1].op == "head" else None
    share: dict[str, torch.Tensor] = {}
    if head:
        weight = dense[head.params[0]]
        for part, column in zip(head.inputs, head.attrs.columns, strict=False):
            width = graph.widths[part]
            share[part] = torch.ones(len(weight), width) if column == SUMMED else weight[:, column : column + width]
    read = [i for n in graph.nodes for m in (n.attrs.members or (n,)) if m is not head for i in m.inputs]
    jobs: list[Job] = []
    for n in members:
        w, a = [dense[p] for p in n.params], n.attrs
        match n.op:
            case "linear" | "cross_v2" | "cross_low_rank":
                out = n.outputs[0]
                weight, bias, params = linear_params(a, w)
                weight = weight.reshape(-1, weight.shape[-1])
                kept = out in read or out == graph.output or out not in share
                cross = n.op in CROSS_LAYERS
                x0, xl = n.inputs[:2] if cross else n.inputs * 2
                x_scale, x0_scale, xl_scale, out_scale = (scales.get(value, 1.0) for value in (n.inputs[-1], x0, xl, out))
                jobs.append(
                    LinearJob(
                        weight, bias, a.activation, cross=cross, head=share.get(out), kept=kept,
                        params=params, slope=a.slope, outer_bias=a.outer_bias,
                        x_scale=x_scale, x0_scale=x0_scale, xl_scale=xl_scale, out_scale=out_scale,
                        shared=shares.columns if shares and n.name in shares.layers else None,
                    )
                )  # fmt: skip
            case "gated":
                weight = torch.block_diag(*w[0].transpose(1, 2)) if w[0].dim() == 3 else w[0]  # type: ignore[no-untyped-call]
                out, bias = n.outputs[0], w[1] if len(w) > 1 else None
                kept = out in read or out not in share
                jobs.append(LinearJob(weight, bias, a.activation, head=share.get(out), kept=kept, gate=a.scalar))
            case "norm":
                jobs.append(NormJob(a.fields, a.dim, a.scalar, w[0], w[1], a.activation == "relu"))
            case "fm":
                jobs.append(FmJob(a.offset, a.fields, a.dim, scales.get(n.inputs[0], 1.0)))
            case "cross_v1_head":
                weights, k, _ = folded_cross(*cross_and_head(w, a.offset))
                jobs.append(CrossJob(weights * scales.get(n.inputs[0], 1.0), k, a.layers))
    return jobs, dense[head.params[1]] if head else None


def job_operands(node: Node, wave: Wave, values: Values, rows: int, workspace: Workspace) -> list[Operands]:
    """What each job of a wave reads and writes."""
    given = []
    for n, job in zip(node.attrs.members, wave.jobs, strict=False):  # the head, if the wave has one, is no job
        kept = not isinstance(job, LinearJob) or job.kept
        out = values[n.outputs[0]][:rows] if kept else None
        x0, xl = (values[i][:rows] for i in n.inputs[:2]) if n.op in CROSS_LAYERS else (None, None)
        x0 = values[n.inputs[0]][:rows] if n.op == "gated" else x0
        shares = workspace.shares[n.name] if isinstance(job, LinearJob) and job.shared else None
        given.append(Operands(values[n.inputs[-1]][:rows], out=out, x0=x0, xl=xl, shares=shares))
    return given


def head_operands(node: Node, wave: Wave, values: Values, rows: int, workspace: Workspace) -> HeadOperands | None:
    """What the head reads and writes, if the wave ends in one."""
    if not wave.has_head:
        return None
    head = node.attrs.members[-1]
    logits = [values[i][:rows] for i in head.inputs[len(head.attrs.columns) :]]
    scores = values[head.outputs[0]][:rows]
    return HeadOperands(logits, scores=scores, done=workspace.done, partial=workspace.head_sums[node.name])


def chain_links(members: Sequence[Node], jobs: Sequence[Job]) -> list[Link]:
    """A chain's links, each with the numbers of the links that it reads. jobs: of all members but a dot and the head."""
    made, own = _link_numbers(members), iter(jobs)
    rows = {n.outputs[0]: n.inputs for n in members if n.op == JOINED}
    mixtures = {n.outputs[0]: n.inputs for n in members if n.op == "mixture"}
    links = []
    for n in _links(members):
        read = n.inputs[0 if n.op == "dot" else -1]
        read, gates = mixtures.get(read, (read, ""))
        x = tuple(made[part] for part in rows.get(read, (read,)) if part in made)
        xl = made.get(n.inputs[1]) if n.op == "cross_low_rank" else None
        x0 = made.get(n.inputs[0]) if n.op == "gated" else None
        links.append(Link(pairs_of(n) if n.op == "dot" else next(own), x, xl, x0, made.get(gates)))
    return links


def pairs_of(dot: Node) -> Pairs:
    return Pairs(dot.attrs.fields, dot.attrs.dim, dot.attrs.keep, dot.attrs.diagonal)


def chain_graph(waves: Graph, precision: str) -> Graph | None:
    """`group_chain`'s, if there is a kernel for its dot."""
    graph = group_chain(waves)
    dots = [m for n in graph.nodes for m in n.attrs.members if m.op == "dot"] if graph else []
    return graph if all(pairs_of(dot).fits(precision) for dot in dots) else None


def chain_head(members: Sequence[Node], bias: torch.Tensor) -> ChainHead:
    """A chain's head, with the numbers of the links that make its logits."""
    head, made = members[-1], _link_numbers(members)
    return ChainHead(bias, tuple(made.get(i) for i in head.inputs[len(head.attrs.columns) :]))


def link_operands(node: Node, chain: Chain, values: Values, rows: int) -> list[ChainOperands]:
    """What each link of a chain is given."""
    given = []
    for n, link in zip(_links(node.attrs.members), chain.links, strict=True):
        x0 = values[n.inputs[0]][:rows] if n.op in (*CROSS_LAYERS, "gated") and link.x0 is None else None
        xl = values[n.inputs[1]][:rows] if n.op in ("cross_low_rank", "dot") and link.xl is None else None
        x = None if link.x else values[n.inputs[-1]][:rows]
        given.append(ChainOperands(x, x0, xl))
    return given


def given_logits(node: Node, chain: Chain, values: Values, rows: int) -> list[torch.Tensor]:
    """The logits of a chain's head that no link makes."""
    head = node.attrs.members[-1]
    sources = zip(head.inputs[len(head.attrs.columns) :], chain.head.logits, strict=True)
    return [values[i][:rows] for i, made in sources if made is None]


def cross_and_head(w: Sequence[torch.Tensor], offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and biases [layers, width] of a cross network, and the head's weights [tasks, width] for its output."""
    weights, biases = torch.stack(list(w[0:-1:2])), torch.stack(list(w[1:-1:2]))
    return weights, biases, w[-1][:, offset : offset + weights.shape[1]]


def _link_numbers(members: Sequence[Node]) -> dict[str, int]:
    return {n.outputs[0]: i for i, n in enumerate(_links(members))}


def _links(members: Sequence[Node]) -> list[Node]:
    """All but the head, joined values, for which nothing runs, and mixtures, which are made by who reads them."""
    return [n for n in members[:-1] if n.op not in (JOINED, "mixture")]
