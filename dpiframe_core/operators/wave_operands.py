"""Binds the nodes of a wave or a chain to what their kernels take: jobs with weights, and the buffers of a launch."""

from collections.abc import Mapping, Sequence

import torch

from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.operators.executor import Values
from kernels.reference import folded_cross
from kernels.waves.chain import Chain, ChainHead, ChainOperands, Link
from kernels.waves.wave import Wave
from kernels.waves.wave_jobs import CrossJob, FmJob, HeadOperands, LinearJob, Operands

DONE = ":done"  # among a lane's buffers: int32[rows / 8], pinned, tells which batch's scores are there
Job = LinearJob | FmJob | CrossJob


def jobs_of(
    members: Sequence[Node], graph: Graph, dense: Mapping[str, torch.Tensor], scales: Mapping[str, float]
) -> tuple[list[Job], torch.Tensor | None]:
    """What the members compute, and the bias of the head if they end in it. scales: of values in fp8, by name."""
    head = members[-1] if members[-1].op == "head" else None
    share: dict[str, torch.Tensor] = {}
    if head:
        weight = dense[head.params[0]]
        for part, column in zip(head.inputs, head.attrs.columns, strict=False):
            share[part] = weight[:, column : column + graph.widths[part]]
    read = [i for n in graph.nodes for m in (n.attrs.members or (n,)) if m is not head for i in m.inputs]
    jobs: list[Job] = []
    for n in members:
        w, a = [dense[p] for p in n.params], n.attrs
        match n.op:
            case "linear" | "cross_v2":
                out, crosses = n.outputs[0], n.op == "cross_v2"
                weight, bias = w[0].reshape(-1, w[0].shape[-1]), w[1] if len(w) == 2 else None
                kept = out in read or out == graph.output or out not in share
                own = (scales.get(value, 1.0) for value in (n.inputs[-1], n.inputs[0], out))
                jobs.append(LinearJob(weight, bias, a.activation, crosses, share.get(out), kept, *own))
            case "fm":
                jobs.append(FmJob(a.offset, a.fields, a.dim, scales.get(n.inputs[0], 1.0)))
            case "cross_v1_head":
                weights, k, _ = folded_cross(*cross_and_head(w, a.offset))
                jobs.append(CrossJob(weights * scales.get(n.inputs[0], 1.0), k, a.layers))
    return jobs, dense[head.params[1]] if head else None


def wave_operands(node: Node, wave: Wave, values: Values, rows: int) -> tuple[list[Operands], int, HeadOperands | None]:
    """What a wave's call takes but `state`."""
    given, head = [], None
    for n, job in zip(node.attrs.members, (*wave.jobs, None), strict=False):
        ins, out = [values[i][:rows] for i in n.inputs], values[n.outputs[0]][:rows]
        if job is None:
            partial, arrived = values[f"{node.name}.partial"], values[f"{node.name}.arrived"]
            head = HeadOperands(ins[len(n.attrs.columns) :], out, values[DONE], partial, arrived)
            break
        kept = not isinstance(job, LinearJob) or job.kept
        given.append(Operands(ins[-1], out if kept else None, ins[0] if n.op == "cross_v2" else None))
    return given, rows, head


def linked(members: Sequence[Node], jobs: Sequence[Job], bias: torch.Tensor | None) -> tuple[list[Link], ChainHead]:
    """A chain's links and head, each with the numbers of the links that it reads."""
    assert bias is not None
    *nodes, head = members
    made = {n.outputs[0]: i for i, n in enumerate(nodes)}
    links = [Link(job, made.get(n.inputs[-1])) for n, job in zip(nodes, jobs, strict=True)]
    return links, ChainHead(bias, tuple(made.get(i) for i in head.inputs[len(head.attrs.columns) :]))


def chain_operands(
    node: Node, chain: Chain, values: Values, rows: int
) -> tuple[list[ChainOperands], list[torch.Tensor], int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a chain's call takes but `state`."""
    *nodes, head = node.attrs.members
    given: list[ChainOperands] = []
    for n, link in zip(nodes, chain.links, strict=True):
        x0 = values[n.inputs[0]][:rows] if n.op == "cross_v2" else None
        x = values[n.inputs[-1]][:rows] if link.x is None else None
        given.append(ChainOperands(x, x0))
    sources = zip(head.inputs[len(head.attrs.columns) :], chain.head.logits, strict=True)
    logits = [values[i][:rows] for i, made in sources if made is None]
    return given, logits, rows, values[head.outputs[0]][:rows], values[DONE], values[f"{node.name}.words"]


def cross_and_head(w: Sequence[torch.Tensor], offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and biases [layers, width] of a cross network, and the head's weights [tasks, width] for its output."""
    weights, biases = torch.stack(list(w[0:-1:2])), torch.stack(list(w[1:-1:2]))
    return weights, biases, w[-1][:, offset : offset + weights.shape[1]]
