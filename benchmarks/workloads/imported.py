"""Models of FuxiCTR's zoo at a size that people train, as runs that our importer reads: random parameters of the shapes that
the library's own classes make (`imported_shapes.json`; made by tests/dpiframe_core/importers/fuxictr/zoo/make.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.importers.fuxictr.files import FuxiFiles, FuxiRun
from dpiframe_core.importers.state_dict import StateDict

SHAPES = Path(__file__).with_name("imported_shapes.json")
TOKENS = 10_000
_TABLES = (
    "embedding_layers",
    "output_emb_layer",
    "embedding_table",
    "embedding_dict",
    "embedding_bags",
)  # part of their parameters' names
FIELDS, NUMBERS, STEPS = 26, 13, 50  # Criteo's, and the steps of a history

_MLP = {"hidden_units": [400, 400, 400], "hidden_activations": "relu"}
_DNN = {"dnn_hidden_units": [400, 400, 400], "dnn_activations": "relu"}
_TASKS = {
    "task": ["binary_classification"] * 2, "num_tasks": 2, "loss": ["binary_crossentropy"] * 2, "hidden_activations": "relu",
    "expert_hidden_units": [512, 256, 128], "gate_hidden_units": [128, 64], "tower_hidden_units": [128, 64],
}  # fmt: skip
_TARGET, _HISTORY = [["item", "cate"]], [["item_steps", "cate_steps"]]

# Beside `embedding_dim` 16 and what the classes have by default.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "LR": {}, "FM": {}, "FFM": {"embedding_dim": 4}, "FFMv2": {"embedding_dim": 4},
    "FwFM": {}, "FmFM": {}, "HFM": _MLP, "HOFM": {}, "LorentzFM": {},
    "AFM": {"attention_dim": 16}, "NFM": _MLP, "PNN": _MLP, "ONN": {**_MLP, "embedding_dim": 4},
    "ONNv2": {**_MLP, "embedding_dim": 4}, "FLEN": _DNN, "DNN": _MLP, "ECN": {"batch_norm": True},
    "DCNv3": {"batch_norm": True},
    "DualMLP": {"mlp1_hidden_units": [400, 400, 400], "mlp2_hidden_units": [400, 400, 400]},
    "DeepCrossing": {"residual_blocks": [400, 400, 400]}, "DeepIM": {**_MLP, "im_order": 3}, "EDCN": {"batch_norm": True},
    "EulerNet": {"shape": [26]}, "GDCN": _DNN, "GDCNP": _DNN,
    "FinalNet": {"block1_hidden_units": [400, 400], "block2_hidden_units": [400, 400]},
    "WuKong": {"embedding_dim": 16, "num_wukong_layers": 3, "lcb_features": 16, "fmb_features": 16, "fmb_mlp_units": [256]},
    "AFN": {"afn_hidden_units": [400, 400], "dnn_hidden_units": [400, 400], "logarithmic_neurons": 600},
    "AutoInt": {**_DNN, "attention_layers": 3, "num_heads": 2, "attention_dim": 64},
    "MaskNet": {"dnn_hidden_units": [400, 400, 400], "model_type": "SerialMaskNet"},
    "FinalMLP": {
        "mlp1_hidden_units": [400, 400, 400], "mlp2_hidden_units": [400, 400, 400], "fs_hidden_units": [256], "num_heads": 10,
    },
    "FiBiNET": _MLP, "InterHAt": {"order": 3, "num_heads": 2, "attention_dim": 16}, "AOANet": {},
    "DESTINE": {**_DNN, "attention_dim": 32, "num_heads": 2}, "SAM": {"interaction_type": "SAM3A"}, "FiGNN": {},
    "BST": {**_DNN, "bst_target_field": _TARGET, "bst_sequence_field": _HISTORY},
    "DMIN": {**_DNN, "target_field": _TARGET, "sequence_field": _HISTORY, "neg_seq_field": None},
    "DIEN": {**_DNN, "dien_target_field": _TARGET, "dien_sequence_field": _HISTORY, "dien_neg_seq_field": []},
    "DMR": {**_DNN, "target_field": _TARGET, "sequence_field": _HISTORY, "neg_seq_field": None, "context_field": None},
    "CCPM": {}, "FGCNN": _DNN, "DSSM": {"user_tower_units": [400, 400, 64], "item_tower_units": [400, 400, 64]},
    "PPNet": {**_MLP, "gate_priors": ["C0", "C1", "C2"]}, "QNN_alpha": {"num_heads": 2},
    "APG_DeepFM": {**_MLP, "rank_k": 32, "overparam_p": None},
    "APG_DCNv2": {"parallel_dnn_hidden_units": [400, 400, 400], "rank_k": 32, "overparam_p": None},
    "MMoE": _TASKS, "PLE": {**_TASKS, "num_shared_experts": 2, "num_specific_experts": 2},
    "ShareBottom": {**_TASKS, "bottom_hidden_units": [512, 256]},
}  # fmt: skip
WITH_HISTORIES = ("BST", "DMIN", "DIEN", "DMR")


def columns(model: str) -> list[dict[str, Any]]:
    """`feature_cols`: Criteo's numbers and categories, or a user, an item with its category and a history of both."""
    plain = {"active": True, "dtype": "str", "type": "categorical"}
    if model in WITH_HISTORIES:
        history = {"active": True, "dtype": "str", "type": "sequence", "max_len": STEPS, "padding": "pre", "splitter": "^"}
        return [
            *({"name": n, **plain} for n in ("user", "age", "city", "item", "cate")),
            {"name": "item_steps", **history, "share_embedding": "item"},
            {"name": "cate_steps", **history, "share_embedding": "cate"},
        ]
    number = {"active": True, "dtype": "float", "type": "numeric", "fill_na": 0}
    sources = ("user", "item", "context")
    return [
        *({"name": f"I{i}", **number, "source": sources[i % 3]} for i in range(NUMBERS)),
        *({"name": f"C{i}", **plain, "source": sources[i % 3]} for i in range(FIELDS)),
    ]


def config(model: str) -> dict[str, Any]:
    return {
        "dataset_id": "d", "model": model, "model_id": model, "model_root": "", "gpu": -1, "verbose": 0, "metrics": ["AUC"],
        "optimizer": "adam", "loss": "binary_crossentropy", "learning_rate": 0.001, "task": "binary_classification",
        "embedding_dim": 16, "feature_cols": columns(model), **SETTINGS[model],
    }  # fmt: skip


def specifications(model: str) -> dict[str, dict[str, Any]]:
    """The feature map's features."""
    out = {}
    for c in columns(model):
        spec = {"source": c.get("source", ""), "type": c["type"]}
        if c["type"] != "numeric":
            spec |= {"padding_idx": 0, "vocab_size": TOKENS + 2}
        out[c["name"]] = spec | {k: c[k] for k in ("max_len", "share_embedding") if k in c}
    return out


def run_of(model: str, seed: int = 0) -> tuple[FuxiRun, StateDict]:
    """A run in memory, as its files would read, and its parameters."""
    nowhere = Path(model)
    files = FuxiFiles(nowhere, nowhere, nowhere, nowhere, None, None)
    specs = specifications(model)
    labels = ("click", "buy") if isinstance(config(model)["task"], list) else ("click",)
    vocabularies = {name: _vocabulary() for name, spec in specs.items() if spec["type"] != "numeric"}
    run = FuxiRun(files, config(model), specs, {c["name"]: c for c in columns(model)}, vocabularies, {}, labels)
    return run, StateDict(_drawn(model, seed), model)


@cache
def _vocabulary() -> VocabularyTable:
    return VocabularyTable.of({"__PAD__": 0, **{f"t{i}": i for i in range(1, TOKENS + 1)}, "__OOV__": TOKENS + 1})


def _shapes(model: str) -> Iterator[tuple[str, list[int]]]:
    """As stored, but an embedding layer's tables, `*` of one dim, by their names."""
    for name, shape in json.loads(SHAPES.read_text())[model].items():
        if "*" not in name:
            yield name, shape
            continue
        for feature, spec in specifications(model).items():
            yield name.replace("*", feature), [*shape, 1] if spec["type"] == "numeric" else [TOKENS + 2, *shape]


def _drawn(model: str, seed: int) -> dict[str, torch.Tensor]:
    generator, out = torch.Generator().manual_seed(seed), {}
    shared = {c["name"]: c["share_embedding"] for c in columns(model) if "share_embedding" in c}
    for name, shape in _shapes(model):
        feature = name.split(".")[-2] if "." in name else ""
        if feature in shared:
            out[name] = out[name.replace(f".{feature}.", f".{shared[feature]}.")]
        else:
            out[name] = drawn_parameter(name, shape, generator)
    return out


def drawn_parameter(name: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Weights that keep a layer's output near its input's scale, statistics of a batch norm of data near 0 and 1."""
    last, is_table = name.split(".")[-1], any(part in name for part in _TABLES)
    if last in ("running_var", "running_mean"):
        return torch.ones(shape) if last == "running_var" else torch.zeros(shape)
    drawn = torch.randn(shape, generator=generator)
    out = drawn * 0.1 if is_table or len(shape) < 2 else drawn / max(1, shape[-1]) ** 0.5
    if is_table and shape[0] == TOKENS + 2:
        out[0] = 0  # the padding's
    if name.startswith("coefficient_W"):  # exponents of AFN's products: those of a trained model keep them finite
        out *= 0.1
    if last == "weight" and len(shape) == 1:  # of a norm
        out += 1
    return out
