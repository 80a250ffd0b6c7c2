"""FuxiCTR 2.3 runs -> source models: one function a model of its zoo, under the zoo's attribute names.

Every parameter of the checkpoint is taken exactly once; hyper-parameters that are not in it come from the run's configuration.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dpiframe_core.architecture import DCN, DCNv2, DeepFM, WideDeep
from dpiframe_core.errors import InputError
from dpiframe_core.importers.fuxictr_files import FuxiFiles, FuxiRun, read_run
from dpiframe_core.importers.fuxictr_layers import FuxiReader
from dpiframe_core.importers.layers import CrossMatrix, CrossVector, factorization_machine
from dpiframe_core.importers.source import Inputs, SourceModel, required
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint


def fuxictr(files: FuxiFiles, context: Sequence[str] = ()) -> SourceModel:
    """Reads a run's files; `context`: features that requests give once.

    Raises:
        InputError: a file is damaged or of another run, or holds what a bundle cannot express; with the names.
    """
    run = read_run(files)
    return fuxictr_model(run, read_checkpoint(files.checkpoint), context)


def fuxictr_model(run: FuxiRun, weights: StateDict, context: Sequence[str] = ()) -> SourceModel:
    """As `fuxictr`, of files already read."""
    where = str(run.files.config)
    name = required(run.config, "model", where, (str,))
    if name not in _MODELS:
        raise InputError(f"{where}: model", name, f"one of {', '.join(_MODELS)}")
    task = run.config.get("task", "binary_classification")
    if task != "binary_classification":
        raise InputError(f"{where}: task", task, "binary_classification")
    return _MODELS[name](run, weights, context)


def _deepfm(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    r.embeddings("embedding_layer.embedding_layer")
    r.linear_weights("fm.lr_layer")
    bias = weights.take("fm.lr_layer.bias", 1)
    mlp, head = r.tower("mlp", "hidden_units", "hidden_activations")
    dense = mlp.parameters("deep") | head.parameters("head")
    dense["head.bias"] = (head.folded()[1] + bias.double()).float()
    architecture = DeepFM(hidden_units=mlp.units, activation=r.activation(mlp, "hidden_activations"))

    def logit(i: Inputs) -> Tensor:
        return i.first_order() + bias.double() + factorization_machine(i.fields()) + head(mlp(i.x()))

    return r.model("DeepFM", (architecture, dense, logit), context, first_order=True)


def _wide_deep(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    r.embeddings("embedding_layer.embedding_layer")
    r.linear_weights("lr_layer")
    mlp, head = r.tower("dnn", "hidden_units", "hidden_activations")
    architecture = WideDeep(hidden_units=mlp.units, activation=r.activation(mlp, "hidden_activations"))

    def logit(i: Inputs) -> Tensor:
        return i.first_order() + head(mlp(i.x()))

    built = architecture, mlp.parameters("deep") | head.parameters("head"), logit
    return r.model("WideDeep", built, context, first_order=True)


def _dcn(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    r.embeddings("embedding_layer.embedding_layer")
    width, layers = r.width, r.count("num_cross_layers")
    cross = CrossVector(
        tuple(weights.take(f"crossnet.cross_net.{i}.weight.weight", 1, width)[0] for i in range(layers)),
        tuple(weights.take(f"crossnet.cross_net.{i}.bias", width) for i in range(layers)),
    )
    mlp = r.mlp("dnn", width, "dnn_hidden_units", "dnn_activations")
    head = r.linear("fc", width + mlp.units[-1], 1)
    architecture = DCN(cross_layers=layers, hidden_units=mlp.units, activation=r.activation(mlp, "dnn_activations"))

    def logit(i: Inputs) -> Tensor:
        x = i.x()
        return head(torch.cat([cross(x), mlp(x)], 1))

    dense = cross.parameters("cross") | mlp.parameters("deep") | head.parameters("head")
    return r.model("DCN", (architecture, dense, logit), context, first_order=False)


def _dcnv2(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    r = FuxiReader(run, weights)
    structure = r.setting("model_structure", str)
    if structure not in ("stacked", "parallel"):
        raise InputError(f"{r.where}: model_structure", structure, "stacked or parallel")
    if run.config.get("use_low_rank_mixture"):
        raise InputError(f"{r.where}: use_low_rank_mixture", True, "false: a mixture of experts has no fused form here")
    r.embeddings("embedding_layer.embedding_layer")
    width, layers = r.width, r.count("num_cross_layers")
    lines = [r.linear(f"crossnet.cross_layers.{i}", width, width) for i in range(layers)]
    cross = CrossMatrix(tuple(line.weight for line in lines), tuple(line.bias for line in lines if line.bias is not None))
    stacked = structure == "stacked"
    mlp = r.mlp(f"{structure}_dnn", width, f"{structure}_dnn_hidden_units", "dnn_activations")
    head = r.linear("fc", mlp.units[-1] + (0 if stacked else width), 1)
    architecture = DCNv2(
        structure="stacked" if stacked else "parallel", cross_layers=layers, hidden_units=mlp.units,
        activation=r.activation(mlp, "dnn_activations"),
    )  # fmt: skip

    def logit(i: Inputs) -> Tensor:
        x = i.x()
        return head(mlp(cross(x)) if stacked else torch.cat([cross(x), mlp(x)], 1))

    dense = cross.parameters("cross") | mlp.parameters("deep") | head.parameters("head")
    return r.model("DCNv2", (architecture, dense, logit), context, first_order=False)


_MODELS: Mapping[str, Callable[[FuxiRun, StateDict, Sequence[str]], SourceModel]] = {
    "DeepFM": _deepfm,
    "WideDeep": _wide_deep,
    "DCN": _dcn,
    "DCNv2": _dcnv2,
}
