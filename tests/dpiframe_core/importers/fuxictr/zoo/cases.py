"""Small runs of FuxiCTR's zoo: a data set of fields, others with histories, and every model, with settings that change it."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 24


@dataclass(frozen=True)
class Case:
    """A model and what its configuration says beside the defaults.

    data: "fields", "target" (a history), "history" (one of two parts), "histories" (also steps that only training reads).
    """

    name: str
    model: str
    settings: dict[str, Any]
    data: str = "fields"
    labels: tuple[str, ...] = ("label",)


MLP = {"hidden_units": [7, 5], "hidden_activations": "relu"}
DNN = {"dnn_hidden_units": [7, 5], "dnn_activations": "relu"}
STEPS = {
    "target_field": [("item", "cate")],
    "sequence_field": [("item_steps", "cate_steps")],
    "neg_seq_field": [("neg_item_steps", "neg_cate_steps")],
}
BST = {"bst_target_field": [("item", "cate")], "bst_sequence_field": [("item_steps", "cate_steps")], "num_heads": 2, **DNN}
WINDOWS = {"channels": [3, 4], "kernel_heights": [3, 3], "pooling_sizes": 2, "recombined_channels": [2, 1]}
APG = {"hypernet_config": {"hidden_units": [5], "hidden_activations": "tanh"}, "rank_k": 3, "overparam_p": 6}
APG_WHOLE = {
    "rank_k": None, "overparam_p": None, "generate_bias": False, "condition_mode": "group-wise",
    "condition_features": ["C2", "I1"], "new_condition_emb": True,
}  # fmt: skip
APG_DCN = {
    "stacked_dnn_hidden_units": [6, 5],
    "parallel_dnn_hidden_units": [7, 4],
    "num_cross_layers": 2,
    "dnn_activations": "PReLU",
}
DMR_TARGET = {
    **DNN, "target_field": "item", "sequence_field": "item_steps", "neg_seq_field": None, "context_field": None,
    "attention_hidden_units": [5], "enable_u2i_rel": False, "enable_i2i_rel": True, "enable_sum_pooling": True,
    "use_pos_emb": False,
}  # fmt: skip
TASKS = {
    "task": ["binary_classification"] * 2,
    "num_tasks": 2,
    "loss": ["binary_crossentropy"] * 2,
    "hidden_activations": "relu",
    "expert_hidden_units": [6, 4],
    "gate_hidden_units": [5],
    "tower_hidden_units": [5],
}

DIEN = {
    "dien_target_field": [("item", "cate")],
    "dien_sequence_field": [("item_steps", "cate_steps")],
    "dien_neg_seq_field": [("neg_item_steps", "neg_cate_steps")],
    **DNN,
}

CASES = [
    Case("dien", "DIEN", DIEN, "histories"),
    Case("dien-replaced", "DIEN", {**DIEN, "gru_type": "AGRU", "attention_type": "dot_attention"}, "histories"),
    Case("dien-mlp", "DIEN", {**DIEN, "attention_type": "din_attention", "attention_hidden_units": [5],
        "attention_activation": "ReLU", "use_attention_softmax": False, "enable_sum_pooling": True, "batch_norm": False},
        "histories"),
    Case("dien-plain", "DIEN", {**DIEN, "gru_type": "GRU", "aux_loss_alpha": 0.3}, "histories"),
    Case("ccpm", "CCPM", {"channels": [4, 3, 2], "kernel_heights": [4, 3, 2]}),
    Case("ccpm-one", "CCPM", {"channels": [2], "kernel_heights": 3, "activation": "relu", "embedding_dim": 4}),
    Case("fgcnn", "FGCNN", {**WINDOWS, **DNN, "embedding_dim": 4, "dnn_batch_norm": True}),
    Case("fgcnn-shared", "FGCNN", {**WINDOWS, **DNN, "share_embedding": True, "conv_batch_norm": False, "conv_activation":
        "ReLU"}),
    Case("ppnet", "PPNet", {**MLP, "gate_priors": ["C1", "I2"], "gate_emb_dim": 3, "gate_hidden_dim": 6}),
    Case("ppnet-norm", "PPNet", {**MLP, "hidden_activations": ["tanh", None], "gate_priors": ["tags"], "batch_norm": True}),
    Case("qnn-alpha", "QNN_alpha", {"embedding_dim": 6, "num_layers": 2, "num_heads": 3, "num_row": 2, "batch_norm": True}),
    Case("qnn-alpha-one", "QNN_alpha", {"num_layers": 1, "num_row": 3}),
    Case("apg-deep-fm", "APG_DeepFM", {**MLP, **APG}),
    Case("apg-deep-fm-whole", "APG_DeepFM", {**MLP, **APG_WHOLE, "hidden_activations": "dice", "batch_norm": True}),
    Case("apg-dcn-v2", "APG_DCNv2", {**APG, **APG_DCN, "model_structure": "stacked_parallel"}),
    Case("apg-dcn-v2-plain", "APG_DCNv2", {**APG, **APG_DCN, "overparam_p": None, "model_structure": "stacked"}),
    Case("apg-dcn-v2-mixed", "APG_DCNv2", {**APG_WHOLE, **APG_DCN, "use_low_rank_mixture": True, "low_rank": 3}),
    Case("apg-dcn-v2-alone", "APG_DCNv2", {"model_structure": "crossnet_only", "num_cross_layers": 2}),
    Case("dssm", "DSSM", {"user_tower_units": [7, 5], "item_tower_units": [6, 5], "batch_norm": True}),
    Case("dmr", "DMR", {**STEPS, **DNN, "context_field": None, "attention_hidden_units": [5], "pos_emb_dim": 3}, "histories"),
    Case("dmr-target", "DMR", DMR_TARGET, "target"),
    Case("lr", "LR", {}),
    Case("fm", "FM", {"embedding_dim": 10}),
    Case("ffm", "FFM", {"embedding_dim": 2}),
    Case("ffm-v2", "FFMv2", {"embedding_dim": 3}),
    Case("fwfm-fields", "FwFM", {"linear_type": "FiLV"}),
    Case("fwfm-features", "FwFM", {"linear_type": "FeLV"}),
    Case("fwfm-weights", "FwFM", {"linear_type": "LW"}),
    Case("fmfm-matrices", "FmFM", {"field_interaction_type": "matrixed"}),
    Case("fmfm-vectors", "FmFM", {"field_interaction_type": "vectorized"}),
    Case("hfm-convolution", "HFM", {**MLP, "interaction_type": "circular_convolution"}),
    Case("hfm-correlation", "HFM", {**MLP, "interaction_type": "circular_correlation", "batch_norm": True}),
    Case("hfm-shallow", "HFM", {"interaction_type": "hadamard_product", "use_dnn": False}),
    Case("hofm", "HOFM", {"order": 3, "reuse_embedding": True}),
    Case("hofm-own", "HOFM", {"order": 4, "embedding_dim": [4, 3, 2]}),
    Case("lorentz-fm", "LorentzFM", {}),
    Case("afm", "AFM", {"attention_dim": 5}),
    Case("afm-plain", "AFM", {"use_attention": False}),
    Case("nfm", "NFM", {**MLP, "batch_norm": True, "embedding_dim": 16}),
    Case("pnn", "PNN", {**MLP, "hidden_activations": ["relu", "tanh"]}),
    Case("onn", "ONN", {**MLP, "embedding_dim": 2}),
    Case("onn-v2", "ONNv2", {**MLP, "embedding_dim": 3}),
    Case("flen", "FLEN", DNN),
    Case("dnn-dice", "DNN", {**MLP, "hidden_activations": ["dice", "PReLU"], "batch_norm": True}),
    Case("dual-mlp", "DualMLP", {"mlp1_hidden_units": [6], "mlp2_hidden_units": [5, 4], "mlp2_batch_norm": True}),
    Case("deep-crossing", "DeepCrossing", {"residual_blocks": [6, 5], "hidden_activations": "relu", "batch_norm": True}),
    Case("deep-crossing-plain", "DeepCrossing", {"residual_blocks": [6], "use_residual": False}),
    Case("deep-im", "DeepIM", {"im_order": 5, "im_batch_norm": True, **MLP}),
    Case("deep-im-shallow", "DeepIM", {"im_order": 3, "hidden_units": None}),
    Case("edcn", "EDCN", {"num_cross_layers": 3, "bridge_type": "hadamard_product", "batch_norm": True, "temperature": 2}),
    Case("edcn-sum", "EDCN", {"num_cross_layers": 2, "bridge_type": "pointwise_addition"}),
    Case("edcn-joined", "EDCN", {"num_cross_layers": 2, "bridge_type": "concatenation"}),
    Case("edcn-attention", "EDCN", {"num_cross_layers": 2, "bridge_type": "attention_pooling"}),
    Case("ecn", "ECN", {"embedding_dim": 4, "num_cross_layers": 2, "num_heads": 2, "batch_norm": True}),
    Case("ecn-plain", "ECN", {"embedding_dim": 6, "num_cross_layers": 3, "layer_norm": False}),
    Case("dcn-v3", "DCNv3", {"embedding_dim": 4, "num_deep_cross_layers": 2, "num_shallow_cross_layers": 3, "batch_norm":
        True}),
    Case("dcn-v3-heads", "DCNv3", {"num_heads": 3, "num_deep_cross_layers": 1, "num_shallow_cross_layers": 2}),
    Case("euler-net", "EulerNet", {"shape": [4, 3], "layer_norm": True}),
    Case("euler-net-plain", "EulerNet", {"shape": [3]}),
    Case("gdcn", "GDCN", {"num_cross_layers": 2, **DNN}),
    Case("gdcn-p", "GDCNP", {"num_cross_layers": 2, **DNN, "batch_norm": True}),
    Case("final-net", "FinalNet", {"block1_hidden_units": [8, 6], "block2_hidden_units": [6], "use_feature_gating": True}),
    Case("final-net-one", "FinalNet", {"block_type": "1B", "block1_hidden_units": [8, 6], "residual_type": "sum",
        "batch_norm": False, "block1_hidden_activations": "relu"}),
    Case("wukong", "WuKong", {"embedding_dim": 4, "num_wukong_layers": 2, "lcb_features": 3, "fmb_features": 4,
        "fmb_mlp_units": [6], "fmp_rank_k": 2, "mlp_hidden_units": [5], "mlp_batch_norm": True}),
    Case("wukong-whole", "WuKong", {"embedding_dim": 4, "num_wukong_layers": 1, "lcb_features": 3, "fmb_features": 3,
        "fmb_mlp_units": [6], "fmp_rank_k": None, "mlp_hidden_units": [5], "mlp_batch_norm": False, "layer_norm": False}),
    Case("afn", "AFN", {"dnn_hidden_units": [5], "afn_hidden_units": [6], "logarithmic_neurons": 3}),
    Case("afn-alone", "AFN", {"ensemble_dnn": False, "afn_hidden_units": [6], "logarithmic_neurons": 3, "batch_norm": False}),
    Case("autoint", "AutoInt", {"attention_layers": 2, "num_heads": 2, "attention_dim": 6, **DNN, "use_wide": True,
        "use_scale": True}),
    Case("autoint-norm", "AutoInt", {"attention_layers": 3, "num_heads": 1, "attention_dim": 4, "layer_norm": True,
        "dnn_hidden_units": []}),
    Case("autoint-bare", "AutoInt", {"attention_layers": 1, "num_heads": 2, "attention_dim": 8, "use_residual": False, **DNN}),
    Case("masknet-serial", "MaskNet", {**{f"dnn_{k}": v for k, v in MLP.items()}, "model_type": "SerialMaskNet"}),
    Case("masknet-parallel", "MaskNet", {**{f"dnn_{k}": v for k, v in MLP.items()}, "model_type": "ParallelMaskNet",
        "parallel_num_blocks": 2, "parallel_block_dim": 6, "reduction_ratio": 0.5}),
    Case("masknet-plain", "MaskNet", {**{f"dnn_{k}": v for k, v in MLP.items()}, "emb_layernorm": False, "net_layernorm":
        False, "reduction_ratio": 2}),
    Case("finalmlp", "FinalMLP", {"mlp1_hidden_units": [8, 6], "mlp2_hidden_units": [4], "fs_hidden_units": [5],
        "fs1_context": ["C1"], "fs2_context": [], "num_heads": 2, "mlp1_batch_norm": True}),
    Case("finalmlp-plain", "FinalMLP", {"mlp1_hidden_units": [6], "mlp2_hidden_units": [4], "use_fs": False}),
    Case("fibinet-pairs", "FiBiNET", {**MLP, "bilinear_type": "field_interaction"}),
    Case("fibinet-each", "FiBiNET", {**MLP, "bilinear_type": "field_each", "excitation_activation": "Sigmoid"}),
    Case("fibinet-all", "FiBiNET", {**MLP, "bilinear_type": "field_all", "reduction_ratio": 2}),
    Case("interhat", "InterHAt", {"order": 3, "num_heads": 2, "attention_dim": 3, "hidden_dim": 5, **MLP}),
    Case("interhat-plain", "InterHAt", {"order": 1, "num_heads": 1, "attention_dim": 4, "layer_norm": False,
        "use_residual": False, **MLP}),
    Case("destine", "DESTINE", {"attention_dim": 6, "num_heads": 2, "attention_layers": 2, **DNN, "use_scale": True}),
    Case("destine-last", "DESTINE", {"attention_dim": 4, "num_heads": 2, "attention_layers": 1, "residual_mode":
        "last_layer", "use_wide": False, "relu_before_att": True}),
    Case("aoanet", "AOANet", {"num_interaction_layers": 2, "num_subspaces": 3, **{f"dnn_{k}": v for k, v in MLP.items()}}),
    Case("sam2a", "SAM", {"interaction_type": "SAM2A"}),
    Case("sam2e", "SAM", {"interaction_type": "SAM2E"}),
    Case("sam3a", "SAM", {"interaction_type": "SAM3A", "use_residual": True, "num_interaction_layers": 2, "aggregation":
        "weighted_pooling"}),
    Case("sam3e", "SAM", {"interaction_type": "SAM3E", "num_interaction_layers": 2, "aggregation": "mean_pooling"}),
    Case("fignn", "FiGNN", {"gnn_layers": 2}),
    Case("fignn-reused", "FiGNN", {"gnn_layers": 2, "reuse_graph_layer": True, "use_gru": False, "use_residual": False}),
    Case("bst", "BST", BST, "history"),
    Case("bst-concat", "BST", {**BST, "seq_pooling_type": "concat", "use_causal_mask": True, "stacked_transformer_layers":
        2}, "history"),
    Case("bst-target", "BST", {**BST, "seq_pooling_type": "target", "use_position_emb": False, "layer_norm": False,
        "use_residual": False, "bst_target_field": "item", "bst_sequence_field": "item_steps"}, "target"),
    Case("dmin", "DMIN", {**STEPS, **DNN, "num_heads": 2, "attention_hidden_units": [5], "enable_sum_pooling": True},
        "histories"),
    Case("dmin-plain", "DMIN", {**STEPS, **DNN, "num_heads": 2, "attention_hidden_units": [5], "use_pos_emb": False,
        "use_behavior_refiner": False, "layer_norm": False, "batch_norm": False, "aux_loss_lambda": 0.5}, "histories"),
    Case("mmoe", "MMoE", {**TASKS, "num_experts": 3}, labels=("click", "buy")),
    Case("ple", "PLE", {**TASKS, "num_layers": 2, "num_shared_experts": 1, "num_specific_experts": 2}, labels=("click", "buy")),
    Case("shared-bottom", "ShareBottom", {**TASKS, "bottom_hidden_units": [6, 5]}, labels=("click", "buy")),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}

_SOURCES = {"I1": "user", "I2": "context", "C1": "user", "C2": "item", "C3": "item", "tags": "context"}
_COMMON = {
    "dataset_id": "d",
    "model_root": "",
    "gpu": -1,
    "verbose": 0,
    "metrics": ["AUC"],
    "optimizer": "adam",
    "loss": "binary_crossentropy",
    "learning_rate": 0.001,
    "task": "binary_classification",
    "embedding_dim": 4,
}


def tokens(name: str) -> list[str]:
    return [f"{name}-{i}" for i in range(5 if name in ("item", "C1") else 3)]


def columns(data: str) -> list[dict[str, Any]]:
    """`feature_cols`, one a column."""
    if data == "fields":
        return [
            *(
                {"name": n, "active": True, "dtype": "float", "type": "numeric", "fill_na": 0, "source": _SOURCES[n]}
                for n in ("I1", "I2")
            ),
            *(
                {"name": n, "active": True, "dtype": "str", "type": "categorical", "source": _SOURCES[n]}
                for n in ("C1", "C2", "C3")
            ),
            {
                "name": "tags",
                "active": True,
                "dtype": "str",
                "type": "sequence",
                "splitter": "^",
                "max_len": 3,
                "padding": "post",
                "feature_encoder": "layers.MaskedAveragePooling()",
                "source": "context",
            },
        ]
    plain = [{"name": n, "active": True, "dtype": "str", "type": "categorical"} for n in ("user", "item", "cate")]
    shared = [("item_steps", "item"), ("cate_steps", "cate"), ("neg_item_steps", "item"), ("neg_cate_steps", "cate")]
    return plain + [
        {
            "name": n,
            "active": True,
            "dtype": "str",
            "type": "sequence",
            "splitter": "^",
            "max_len": 4,
            "padding": "pre",
            "share_embedding": of,
        }
        for n, of in shared[: {"target": 1, "history": 2, "histories": 4}[data]]
    ]


def config(case: Case) -> dict[str, Any]:
    return _COMMON | {"model": case.model, "model_id": case.name, "feature_cols": columns(case.data)} | case.settings


def vocabulary(column: dict[str, Any]) -> dict[str, int]:
    known = tokens(column.get("share_embedding", column["name"]))
    return {"__PAD__": 0, **{t: i for i, t in enumerate(known, 1)}, "__OOV__": len(known) + 1}


def feature_map(case: Case) -> dict[str, Any]:
    features = []
    for c in columns(case.data):
        spec: dict[str, Any] = {"source": c.get("source", ""), "type": c["type"]}
        if c["type"] != "numeric":
            spec |= {"padding_idx": 0, "vocab_size": len(vocabulary(c))}
        spec |= {k: c[k] for k in ("max_len", "feature_encoder", "share_embedding") if k in c}
        features.append({c["name"]: spec})
    length = sum(c.get("max_len", 1) for c in columns(case.data))
    return {
        "dataset_id": "d",
        "num_fields": len(features),
        "total_features": 0,
        "input_length": length,
        "labels": list(case.labels),
        "features": features,
    }


def rows(data: str) -> list[dict[str, str]]:
    """Raw rows: known and unknown tokens, empty cells, lists of every length from none to one more than fits."""
    draw, out = np.random.default_rng(5), []
    for i in range(ROWS):
        row = {}
        lengths: dict[str, int] = {}
        for c in columns(data):
            own = tokens(c.get("share_embedding", c["name"]))
            if c["type"] == "numeric":
                row[c["name"]] = "" if i == 3 else f"{draw.normal():.4f}"
            elif c["type"] == "categorical":
                row[c["name"]] = "" if i == 4 else "unseen" if i == 5 else str(draw.choice(own))
            else:  # the parts of a history are equally long
                group = "neg" if c["name"].startswith("neg") else "own"
                length = lengths.setdefault(group, int(i % (c["max_len"] + 2)))
                row[c["name"]] = "^".join(str(draw.choice([*own, "unseen"])) for _ in range(length))
        out.append(row)
    return out


def encoded(data: str) -> dict[str, np.ndarray]:
    """What FuxiCTR's feature processor and loaders give of them: fill, look up, pad, cut the end (or, "pre", the front)."""
    out = {}
    for c in columns(data):
        cells = [row[c["name"]] for row in rows(data)]
        if c["type"] == "numeric":
            out[c["name"]] = np.array([float(cell or 0) for cell in cells], np.float32)
            continue
        ids = vocabulary(c)
        if c["type"] == "categorical":
            out[c["name"]] = np.array([ids.get(cell, ids["__OOV__"]) for cell in cells])
            continue
        longest, front = c["max_len"], c["padding"] == "pre"
        lists = [[ids.get(t, ids["__OOV__"]) for t in cell.split("^")] if cell else [] for cell in cells]
        cut = [values[-longest:] if front else values[:longest] for values in lists]
        padded = [[0] * (longest - len(v)) + v if front else v + [0] * (longest - len(v)) for v in cut]
        out[c["name"]] = np.array(padded)
    return out


def write_run(case: Case, folder: Path) -> None:
    """All files of a run but its checkpoint and expected scores."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    plain = json.loads(json.dumps(config(case)))  # tuples as YAML has them
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    (folder / "feature_map.json").write_text(json.dumps(feature_map(case)))
    (folder / "feature_vocab.json").write_text(
        json.dumps({c["name"]: vocabulary(c) for c in columns(case.data) if c["type"] != "numeric"})
    )
    with (folder / "test.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*case.labels, *rows(case.data)[0]])
        writer.writeheader()
        writer.writerows({**dict.fromkeys(case.labels, "0"), **row} for row in rows(case.data))
