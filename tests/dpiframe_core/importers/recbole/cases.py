"""Small RecBole models: one data set of tokens, a list and numbers, and every model with settings that change its graph."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROWS, LONGEST = 24, 3
TOKENS = {"user_id": 6, "item_id": 5, "gender": 2, "class": 7}  # beside [PAD]
LISTS, NUMBERS = ("class",), ("age", "price")
FIELDS = ("user_id", "item_id", "class", "age", "gender", "price")  # as the data set has them


@dataclass(frozen=True)
class Case:
    """config: of the library; settings: what the spec has of it."""

    name: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = FIELDS


MLP = {"mlp_hidden_size": [7, 5], "dropout_prob": 0.2}
ATTENTION = {"mlp_hidden_size": [7], "attention_size": 6, "n_layers": 2, "num_heads": 2, "dropout_probs": [0.1, 0.2, 0.3]}
CIN = {**MLP, "reg_weight": 0, "cin_layer_size": [6, 4, 3]}
CASES = [
    Case("fm", "FM"),
    Case("fm-tokens", "FM", fields=("user_id", "item_id", "gender")),
    Case("nfm", "NFM", MLP),
    Case("deepfm", "DeepFM", MLP),
    Case("widedeep", "WideDeep", MLP),
    Case("dcn", "DCN", {**MLP, "cross_layer_num": 3, "reg_weight": 0}),
    Case("xdeepfm", "xDeepFM", {**CIN, "direct": False}, {"direct": False}),
    Case("xdeepfm-direct", "xDeepFM", {**CIN, "direct": True}, {"direct": True}),
    Case("autoint", "AutoInt", {**ATTENTION, "has_residual": True}, {"num_heads": 2}),
    Case("autoint-plain", "AutoInt", {**ATTENTION, "num_heads": 3, "has_residual": False}, {"num_heads": 3}),
]
BY_NAME = {case.name: case for case in CASES}


def vocabulary(name: str) -> dict[str, int]:
    return {f"{name}-{i}": i for i in range(1, TOKENS[name] + 1)}


def rows(case: Case) -> dict[str, list[Any]]:
    """Raw columns: known tokens, missing ones, lists of every length."""
    draw, out = np.random.default_rng(5), {}
    for name in case.fields:
        known = list(vocabulary(name)) if name in TOKENS else []
        if name in LISTS:
            out[name] = [[str(t) for t in draw.choice(known, i % (LONGEST + 1))] for i in range(ROWS)]
        elif name in TOKENS:
            out[name] = [None if i == 4 else str(draw.choice(known)) for i in range(ROWS)]
        else:
            out[name] = [round(float(v), 4) for v in draw.normal(size=ROWS)]
    return out


def encoded(case: Case) -> dict[str, np.ndarray]:
    """What RecBole's data set gives of them: ids from 1, [PAD] for what lacks, a number beside the index of its row."""
    out = {}
    for name, column in rows(case).items():
        if name in LISTS:
            ids = [[vocabulary(name)[t] for t in cell] for cell in column]
            out[name] = np.array([cell + [0] * (LONGEST - len(cell)) for cell in ids])
        elif name in TOKENS:
            out[name] = np.array([0 if t is None else vocabulary(name)[t] for t in column])
        else:
            out[name] = np.stack([np.array(column, np.float32), np.ones(ROWS, np.float32)], 1)
    return out


def spec(case: Case) -> dict[str, Any]:
    features = []
    for name in case.fields:
        if name in NUMBERS:
            features.append({"kind": "dense", "name": name})
            continue
        more = {"max_values": LONGEST, "missing_id": -1, "splitter": " ", "padding_value": ""} if name in LISTS else {}
        features.append({"name": name, "values": "string", "vocabulary": f"{name}.json", **more})
    return {"model": case.model, "features": features, "settings": case.settings}
