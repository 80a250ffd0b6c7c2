"""A live DeepCTR-Torch model's feature columns and settings as a spec, which its checkpoints do not hold; and its own scores.

Reads attributes of the model; never imports its library.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, Spec
from dpiframe_core.importers.source_model import Inputs

_ACTIVATIONS = {
    "ReLU": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Identity": "linear", "PReLU": "prelu", "Dice": "dice",
    "GELU": "gelu", "LeakyReLU": "leakyrelu",
}  # fmt: skip


def spec_of(model: Any) -> Spec:
    """From `dnn_feature_columns`, the linear model's columns, and the modules.

    Raises:
        InputError: it is no DeepCTR-Torch model, or has something that a spec cannot say.
    """
    name = type(model).__name__
    if not hasattr(model, "dnn_feature_columns") or not hasattr(model, "linear_model"):
        raise InputError("model", name, "a model of DeepCTR-Torch")
    history = [f"hist_{n}" for n in getattr(model, "history_feature_list", [])]
    linear = model.linear_model
    wide = [*linear.sparse_feature_columns, *linear.varlen_sparse_feature_columns, *linear.dense_feature_columns]
    columns = {c.name: c for c in [*model.dnn_feature_columns, *wide]}
    return Spec(
        model=name,
        features=tuple(_feature(c, name in history) for name, c in columns.items()),
        wide=tuple(c.name for c in wide),
        deep=tuple(dict.fromkeys(c.name for c in model.dnn_feature_columns)),
        settings=_settings(model, name),
    )


def takes_any_rows(model: Any) -> bool:
    """Whether rows drawn at random mean the same to the model as to us.

    Not if lists of different lengths share a column of lengths, nor where an empty list's maximum or an empty history's weights
    are asked for: the library has -1e9 there, or weighs padding, and we have 0.
    """
    if type(model).__name__ == "DIN" and model.attention.weight_normalization:
        return False
    lists = {c.name: c for c in _columns(model) if type(c).__name__ == "VarLenSparseFeat"}.values()
    lengths = [c.length_name for c in lists if c.length_name is not None]
    return len(set(lengths)) == len(lengths) and all(c.combiner != "max" for c in lists)


def _columns(model: Any) -> list[Any]:
    return [*model.dnn_feature_columns, *model.linear_model.varlen_sparse_feature_columns]


def called(model: Any, inputs: Inputs) -> Tensor:
    """float64[n, 1]: the model's own probabilities, whatever mode it is in."""
    columns = _columns(model)
    lists_of = {c.length_name: c.name for c in columns if getattr(c, "length_name", None)}
    parts = []
    for name in model.feature_index:  # in the order of its input's columns
        values = inputs.column(lists_of.get(name, name)).astype(np.float32)
        parts.append((values >= 0).sum(1, keepdims=True) if name in lists_of else values)
    kinds = {c.name for c in columns if type(c).__name__ == "DenseFeat"}
    x = np.concatenate([v if n in kinds else v.clip(min=0) for n, v in zip(model.feature_index, parts, strict=True)], 1)
    weight, training = next(model.parameters()), model.training
    model.eval()
    try:
        with torch.no_grad():
            scores: Tensor = model(torch.from_numpy(x).to(weight.device, torch.float32))
    finally:
        model.train(training)
    return scores.double().cpu()


def _feature(column: Any, history: bool) -> SparseFeature | DenseFeature:
    match type(column).__name__:
        case "DenseFeat":
            if column.dimension != 1:
                raise InputError(f"columns.{column.name}.dimension", column.dimension, "1: a number a feature")
            return DenseFeature(kind="dense", name=column.name)
        case "SparseFeat":
            _refuse_hash(column)
            return SparseFeature(name=column.name, table=column.embedding_name)
        case "VarLenSparseFeat":
            _refuse_hash(column)
            return SparseFeature(
                name=column.name,
                table=column.embedding_name,
                max_values=column.maxlen,
                pooling="none" if history else column.combiner,
                # Without a length column 0 is padding; with one, whatever lies within the length is a value.
                padding_value=0 if column.length_name is None else None,
            )
    raise InputError(f"columns.{column.name}", type(column).__name__, "SparseFeat, VarLenSparseFeat or DenseFeat")


def _refuse_hash(column: Any) -> None:
    if column.use_hash:
        raise InputError(f"columns.{column.name}.use_hash", True, "False: DeepCTR-Torch hashes nothing, whatever this says")


def _settings(model: Any, name: str) -> dict[str, Any]:
    out: dict[str, Any] = {"task": model.out.task}
    dnn = getattr(model, "dnn", None)
    if dnn is not None:
        out["dnn_activation"] = _activation("dnn", dnn.activation_layers[0])
    match name:
        case "DeepFM":
            out["use_fm"] = model.use_fm
        case "xDeepFM":
            out |= {"cin_activation": _activation("cin", model.cin.activation), "cin_split_half": model.cin.split_half}
        case "DIN":
            unit = model.attention
            out |= {
                "history_feature_list": list(model.history_feature_list),
                "att_activation": _activation("attention", unit.local_att.dnn.activation_layers[0]),
                "att_weight_normalization": unit.weight_normalization,
            }
    return out


def _activation(where: str, module: Any) -> str:
    name = type(module).__name__
    if name not in _ACTIVATIONS:
        raise InputError(f"{where}: activation", name, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
