"""FuxiCTR's models of plain embeddings: DeepFM, Wide&Deep, xDeepFM, DCN, DCN-V2, under the attribute names of its model zoo.

Each function takes every parameter of its model once and says how the library computes the logit (`model_zoo/*/src/*.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM, WideDeep, XDeepFM
from dpiframe_core.importers.fuxictr.files import FuxiRun
from dpiframe_core.importers.fuxictr.layers import FuxiReader
from dpiframe_core.importers.source_interactions import (
    CompressedInteraction,
    CrossMatrix,
    CrossMixture,
    CrossVector,
    factorization_machine,
    read_mixture,
)
from dpiframe_core.importers.source_layers import Activation, Mlp, side_by_side
from dpiframe_core.importers.source_model import Inputs, SourceLayers, SourceModel
from dpiframe_core.importers.state_dict import StateDict


def deepfm(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    r.embeddings("embedding_layer.embedding_layer")
    r.linear_weights("fm.lr_layer")
    bias = weights.take("fm.lr_layer.bias", 1)
    mlp, head = r.tower("mlp", "hidden_units", "hidden_activations")
    dense = mlp.parameters("deep") | head.parameters("head")
    dense["head.bias"] = (head.folded()[1] + bias.double()).float()
    architecture = DeepFM(hidden_units=mlp.units, activation=mlp.activations)

    def logit(i: Inputs) -> Tensor:
        return i.first_order() + bias.double() + factorization_machine(i.fields()) + head(mlp(i.x()))

    return r.model("DeepFM", SourceLayers(architecture, dense, logit), context, first_order=True)


def wide_deep(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    r.embeddings("embedding_layer.embedding_layer")
    r.linear_weights("lr_layer")
    mlp, head = r.tower("dnn", "hidden_units", "hidden_activations")
    architecture = WideDeep(hidden_units=mlp.units, activation=mlp.activations)

    def logit(i: Inputs) -> Tensor:
        return i.first_order() + head(mlp(i.x()))

    layers = SourceLayers(architecture, mlp.parameters("deep") | head.parameters("head"), logit)
    return r.model("WideDeep", layers, context, first_order=True)


def xdeepfm(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    r.embeddings("embedding_layer.embedding_layer")
    r.linear_weights("lr_layer")
    fields, units = len(r.fields), r.units("cin_hidden_units")
    kernels, biases, before = [], [], fields
    for i, size in enumerate(units, 1):
        kernel = weights.take(f"cin.cin_layer.layer_{i}.weight", size, fields * before, 1)
        # Its channels go along X^0 first; ours along the previous layer's maps.
        kernels.append(kernel.reshape(size, fields, before).transpose(1, 2))
        biases.append(weights.take(f"cin.cin_layer.layer_{i}.bias", size))
        before = size
    cin = CompressedInteraction(tuple(kernels), tuple(biases), Activation("identity"))
    pooled = r.linear("cin.fc", sum(units), 1)
    mlp, last = r.tower("dnn", "dnn_hidden_units", "dnn_activations") if r.units("dnn_hidden_units") else (Mlp(()), None)
    head = side_by_side([pooled, *([last] if last else [])])
    architecture = XDeepFM(cin_units=cin.units, hidden_units=mlp.units, activation=mlp.activations)

    def logit(i: Inputs) -> Tensor:
        deep = last(mlp(i.x())) if last else 0.0
        return i.first_order() + pooled(cin(i.fields())) + deep

    dense = cin.parameters("cin") | mlp.parameters("deep") | head.parameters("head")
    return r.model("xDeepFM", SourceLayers(architecture, dense, logit), context, first_order=True)


def dcn(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    r.embeddings("embedding_layer.embedding_layer")
    width, layers = r.width, r.count("num_cross_layers")
    cross = CrossVector(
        tuple(weights.take(f"crossnet.cross_net.{i}.weight.weight", 1, width)[0] for i in range(layers)),
        tuple(weights.take(f"crossnet.cross_net.{i}.bias", width) for i in range(layers)),
    )
    mlp = r.mlp("dnn", width, "dnn_hidden_units", "dnn_activations") if r.units("dnn_hidden_units") else Mlp(())
    head = r.linear("fc", width + (mlp.units or (0,))[-1], 1)
    architecture = DCN(cross_layers=layers, hidden_units=mlp.units, activation=mlp.activations)

    def logit(i: Inputs) -> Tensor:
        x = i.x()
        return head(torch.cat([cross(x), *([mlp(x)] if mlp.units else [])], 1))

    dense = cross.parameters("cross") | mlp.parameters("deep") | head.parameters("head")
    return r.model("DCN", SourceLayers(architecture, dense, logit), context, first_order=False)


def dcnv2(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    structure = r.setting("model_structure", str)
    if structure not in ("stacked", "parallel", "stacked_parallel", "crossnet_only"):
        raise InputError(f"{r.where}: model_structure", structure, "stacked, parallel, stacked_parallel or crossnet_only")
    r.embeddings("embedding_layer.embedding_layer")
    width, layers = r.width, r.count("num_cross_layers")
    cross = _mixture(r, width, layers) if run.config.get("use_low_rank_mixture") else matrices(r, width, layers)
    mlps = {
        kind: r.mlp(f"{kind}_dnn", width, f"{kind}_dnn_hidden_units", "dnn_activations")
        for kind in ("stacked", "parallel")
        if kind in structure
    }
    stacked, parallel = mlps.get("stacked"), mlps.get("parallel")
    first, second = stacked or parallel or Mlp(()), parallel if stacked else None
    head = r.linear("fc", sum(m.units[-1] for m in mlps.values()) + (0 if stacked else width), 1)
    each = first.activations if second is None else Mlp(first.layers + second.layers).activations
    if second is not None and isinstance(each, tuple):
        raise InputError(f"{r.where}: dnn_activations", list(each), "one activation for both MLPs")
    rank, experts = (cross.u[0].shape[2], len(cross.gates)) if isinstance(cross, CrossMixture) else (None, None)
    architecture = DCNv2(
        structure=structure, cross_layers=layers, hidden_units=first.units, activation=each,
        parallel_hidden_units=second.units if second else (),
        rank=rank, experts=experts,
    )  # fmt: skip

    def logit(i: Inputs) -> Tensor:
        x = i.x()
        parts = [stacked(cross(x)) if stacked else cross(x), *([parallel(x)] if parallel else [])]
        return head(torch.cat(parts, 1))

    dense = cross.parameters("cross") | first.parameters("deep") | head.parameters("head")
    dense |= second.parameters("parallel") if second else {}
    return r.model("DCNv2", SourceLayers(architecture, dense, logit), context, first_order=False)


def matrices(r: FuxiReader, width: int, layers: int) -> CrossMatrix:
    names = [f"crossnet.cross_layers.{i}" for i in range(layers)]
    return CrossMatrix(
        tuple(r.weights.take(f"{name}.weight", width, width) for name in names),
        tuple(r.weights.take(f"{name}.bias", width) for name in names),
    )


def _mixture(r: FuxiReader, width: int, layers: int) -> CrossMixture:
    lists, experts = ("U_list", "V_list", "C_list"), r.count("num_experts")
    return read_mixture(r.weights, lists, layers, experts, width, r.count("low_rank"))
