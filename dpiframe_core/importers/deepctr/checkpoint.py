"""DeepCTR-Torch 0.3 checkpoints and live models -> source models: WDL, DeepFM, xDeepFM, DCN, DCNMix, DIN.

Its deep input is all sparse embeddings, then the pooled sequences, then the numbers; the linear model has weights of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import DCN, DIN, Architecture, DCNv2, DeepFM, TargetAttention, WideDeep, XDeepFM
from dpiframe_core.importers.deepctr.columns import called, spec_of, takes_any_rows
from dpiframe_core.importers.deepctr.layers import DeepCtrReader
from dpiframe_core.importers.model_spec import SpecFile, read_spec, with_vocabularies
from dpiframe_core.importers.sequential_mlp import activation_kinds, read_linear
from dpiframe_core.importers.source_interactions import (
    Attention,
    CompressedInteraction,
    CrossMatrix,
    CrossMixture,
    CrossVector,
    factorization_machine,
)
from dpiframe_core.importers.source_layers import Activation
from dpiframe_core.importers.source_model import Inputs, SourceLayers, SourceModel
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint


def deepctr_torch(model: Any) -> SourceModel:
    """A live model, in whatever mode it is, as `write_import` takes it, which then compares with the model's own scores.

    Raw values are the ids it was trained on.

    Raises:
        InputError: it is of an unknown kind, or has what a bundle cannot express; by name.
    """
    name = f"the {type(model).__name__} model"
    source = read_deepctr(with_vocabularies(spec_of(model), name), StateDict(model.state_dict(), name))
    return replace(source, own=partial(called, model)) if takes_any_rows(model) else source


def deepctr_torch_checkpoint(checkpoint: Path, spec: Path) -> SourceModel:
    """A `torch.save(model.state_dict(), ..)` and a spec of its feature columns.

    Raises:
        InputError: a file is damaged, they do not fit each other, or hold what a bundle cannot express; by name.
    """
    return read_deepctr(read_spec(spec), read_checkpoint(checkpoint))


def read_deepctr(file: SpecFile, weights: StateDict) -> SourceModel:
    """As the two above, of what they read."""
    build = file.one_of(_MODELS)
    r = DeepCtrReader(file, weights)
    task = r.settings.take("task", str)
    if task != "binary":
        raise InputError(f"{file.where}: settings.task", task, "binary: scores are probabilities of a click")
    return r.model(build(r))


def _wdl(r: DeepCtrReader) -> SourceLayers:
    return _with_linear(r, WideDeep, pairwise=False)


def _deepfm(r: DeepCtrReader) -> SourceLayers:
    pairwise = r.settings.take("use_fm", bool)
    return _with_linear(r, DeepFM if pairwise else WideDeep, pairwise=pairwise)


def _with_linear(r: DeepCtrReader, kind: type[WideDeep] | type[DeepFM], *, pairwise: bool) -> SourceLayers:
    r.linear_model(required=True)
    mlp, last = r.tower()
    head, out = r.head([last]), r.bias

    def logit(i: Inputs) -> Tensor:
        linear = r.first_order(i) + last(mlp(r.deep_input(i))) + out
        return linear + factorization_machine(r.fields(i)) if pairwise else linear

    architecture = kind(hidden_units=mlp.units, activation=mlp.activations)
    return SourceLayers(architecture, mlp.parameters("deep") | head.parameters("head"), logit)


def _xdeepfm(r: DeepCtrReader) -> SourceLayers:
    r.linear_model(required=True)
    mlp, last = r.tower()
    halves, count, before = r.settings.take("cin_split_half", bool), len(r.embedded), len(r.embedded)
    kind = activation_kinds(
        r.settings.take("cin_activation", str), 1, f"{r.where}: settings.cin_activation", refused=("prelu", "dice")
    )[0]
    kernels, biases, layers = [], [], r.weights.children("cin.conv1ds")
    for i in layers:
        kernel = r.weights.take(f"cin.conv1ds.{i}.weight", None, count * before, 1)
        kernels.append(kernel.reshape(len(kernel), before, count))
        biases.append(r.weights.take(f"cin.conv1ds.{i}.bias", len(kernel)))
        before = len(kernel) // 2 if halves else len(kernel)
    cin = CompressedInteraction(tuple(kernels), tuple(biases), Activation(kind), halves)
    width = sum(n // 2 if halves and i < len(kernels) - 1 else n for i, n in enumerate(cin.units))
    pooled = read_linear(r.weights, "cin_linear", width, 1, bias=False)
    head, out = r.head([pooled, last]), r.bias

    def logit(i: Inputs) -> Tensor:
        return r.first_order(i) + pooled(cin(r.fields(i))) + last(mlp(r.deep_input(i))) + out

    architecture = XDeepFM(
        cin_units=cin.units, cin_activation=kind, cin_halves=halves, hidden_units=mlp.units, activation=mlp.activations
    )  # fmt: skip
    return SourceLayers(architecture, cin.parameters("cin") | mlp.parameters("deep") | head.parameters("head"), logit)


def _dcn(r: DeepCtrReader) -> SourceLayers:
    linear = r.linear_model(required=False)
    mlp = r.mlp()
    shape = r.weights.shape("crossnet.kernels")
    layers, width = (shape[0] if shape else 0), r.width
    matrices = shape is not None and len(shape) == 3 and shape[2] != 1
    kernels = r.weights.take("crossnet.kernels", layers, width, width if matrices else 1)
    biases = tuple(r.weights.take("crossnet.bias", layers, width, 1)[:, :, 0])
    cross: CrossMatrix | CrossVector
    architecture: Architecture
    if matrices:
        cross = CrossMatrix(tuple(kernels), biases)
        architecture = DCNv2(
            structure="parallel", cross_layers=layers, hidden_units=mlp.units, activation=mlp.activations, first_order=linear
        )
    else:
        cross = CrossVector(tuple(kernels[:, :, 0]), biases)
        architecture = DCN(cross_layers=layers, hidden_units=mlp.units, activation=mlp.activations, first_order=linear)
    return _crossed(r, architecture, cross, mlp)


def _dcn_mix(r: DeepCtrReader) -> SourceLayers:
    linear = r.linear_model(required=False)
    mlp, width = r.mlp(), r.width
    u = r.weights.take("crossnet.U_list", None, None, width, None)
    layers, experts, _, rank = u.shape
    v = r.weights.take("crossnet.V_list", layers, experts, width, rank)
    c = r.weights.take("crossnet.C_list", layers, experts, rank, rank)
    biases = tuple(r.weights.take("crossnet.bias", layers, width, 1)[:, :, 0])
    gates = torch.cat([r.weights.take(f"crossnet.gating.{e}.weight", 1, width) for e in range(experts)])
    cross = CrossMixture(tuple(u), tuple(v), tuple(c), biases, gates)
    architecture = DCNv2(
        structure="parallel", cross_layers=layers, rank=rank, experts=experts, hidden_units=mlp.units,
        activation=mlp.activations, first_order=linear,
    )  # fmt: skip
    return _crossed(r, architecture, cross, mlp)


def _crossed(r: DeepCtrReader, architecture: Architecture, cross: Any, mlp: Any) -> SourceLayers:
    last = read_linear(r.weights, "dnn_linear", r.width + mlp.units[-1], 1, bias=False)
    head, out = r.head([last]), r.bias

    def logit(i: Inputs) -> Tensor:
        x = r.deep_input(i)
        return r.first_order(i) + last(torch.cat([cross(x), mlp(x)], 1)) + out

    return SourceLayers(architecture, cross.parameters("cross") | mlp.parameters("deep") | head.parameters("head"), logit)


def _din(r: DeepCtrReader) -> SourceLayers:
    targets = r.settings.take("history_feature_list", list)
    softmax = r.settings.take("att_weight_normalization", bool)
    histories = [f"hist_{name}" for name in targets]
    known = {f.name for f in r.deep}
    for name in [*targets, *histories]:
        if name not in known:
            raise InputError(f"{r.where}: settings.history_feature_list", name, "a feature of the model")
    # Keys come in the order of the columns, queries in that of the sparse ones: they must pair up.
    queries = [f.name for f in r.embedded if f.name in targets]
    keys = [f.name for f in r.deep if f.name in histories]
    if keys != [f"hist_{name}" for name in queries]:
        raise InputError(f"{r.where}: features", keys, f"histories in the order of {queries}")
    r.histories_last(keys)
    dim = sum(r.dim(name) for name in queries)
    inner = r.mlp("attention.local_att.dnn", 4 * dim, "att_activation")
    unit = Attention(inner, read_linear(r.weights, "attention.local_att.dense", inner.units[-1], 1), softmax)
    kinds = inner.activations
    assert not isinstance(kinds, tuple)
    mlp, last = r.tower()
    head, out = r.head([last]), r.bias
    attention = TargetAttention(
        targets=tuple(queries), sequences=tuple(keys), hidden_units=inner.units, activation=kinds, softmax=softmax
    )
    architecture = DIN(attention=(attention,), hidden_units=mlp.units, activation=mlp.activations)

    def logit(i: Inputs) -> Tensor:
        query = torch.cat([i.named(name) for name in queries], 1)
        found = [i.sequence(name) for name in keys]
        interest = unit(query, torch.cat([values for values, _ in found], 2), found[0][1])
        return last(mlp(r.deep_input(i, interest))) + out

    dense = unit.parameters("attention.0") | mlp.parameters("deep") | head.parameters("head")
    return SourceLayers(architecture, dense, logit)


_MODELS: Mapping[str, Callable[[DeepCtrReader], SourceLayers]] = {
    "WDL": _wdl,
    "DeepFM": _deepfm,
    "xDeepFM": _xdeepfm,
    "DCN": _dcn,
    "DCNMix": _dcn_mix,
    "DIN": _din,
}
