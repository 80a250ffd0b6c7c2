"""Small RecBole DINs and DIENs: items with a category, users with tokens, a list and a number, histories of every length."""

from typing import Any

import numpy as np

from tests.dpiframe_core.importers.recbole.cases import Case

ROWS, STEPS, LONGEST = 24, 6, 3
TOKENS = {"item_id": 9, "category": 4, "tags": 5, "user_id": 5, "gender": 2, "likes": 6}  # beside [PAD]
ITEM, USER = ("item_id", "tags", "price", "category"), ("user_id", "likes", "gender", "age")  # as the data set has them
LISTS, NUMBERS = ("tags", "likes"), ("price", "age")

MLP = {"mlp_hidden_size": [7, 5], "dropout_prob": 0.2, "pooling_mode": "mean", "embedding_size": 4}
FIELDS = ("item_id", "category", *USER)


def _dien(name: str, kind: str, fields: tuple[str, ...] = FIELDS, **more: Any) -> Case:
    return Case(f"dien-{name}", "DIEN", {**MLP, "alpha": 1.0, "gru_type": kind, **more}, {"gru_type": kind}, fields)


CASES = [
    Case("din", "DIN", MLP, fields=FIELDS),
    Case("din-10", "DIN", {**MLP, "embedding_size": 10}, fields=("item_id", "user_id")),
    Case("din-16", "DIN", {**MLP, "embedding_size": 16, "mlp_hidden_size": [6]}, fields=("item_id", "category", "user_id")),
    Case("din-wide", "DIN", {**MLP, "embedding_size": 10, "pooling_mode": "sum"}, fields=(*ITEM, "user_id")),
    _dien("gru", "GRU"),
    _dien("aigru", "AIGRU", embedding_size=10),
    _dien("agru", "AGRU", pooling_mode="sum"),
    _dien("augru", "AUGRU", embedding_size=16, mlp_hidden_size=[6]),
    _dien("max", "AUGRU", pooling_mode="max"),
    _dien("ids", "AUGRU", ("item_id", "user_id")),
    _dien("wide", "AUGRU", (*ITEM, *USER)),
]
BY_NAME = {case.name: case for case in CASES}


def is_wide(case: Case) -> bool:
    """Whether its checkpoint has one row an item, of all its features: a list or a number has no other place."""
    return any(name in case.fields for name in ("tags", "price"))


def items(case: Case) -> list[str]:
    """Those that a request has."""
    return ["item_id"] if is_wide(case) else [name for name in ITEM if name in case.fields]


def vocabulary(name: str) -> dict[str, int]:
    return {f"{name}-{i}": i for i in range(1, TOKENS[name] + 1)}


def catalogue(name: str) -> np.ndarray:
    """Of each item or user, id 0 first, what it has of a field: int64[n], [n, LONGEST] of a list, float32[n, 2] of a number."""
    of = "item_id" if name in ITEM else "user_id"
    draw, count = np.random.default_rng(len(name)), TOKENS[of] + 1
    if name == of:
        return np.arange(count)
    if name in NUMBERS:
        return np.stack([draw.normal(size=count), np.ones(count)], 1).astype(np.float32)
    if name in LISTS:  # of [PAD] an empty one
        rows, length = draw.integers(1, TOKENS[name] + 1, (count, LONGEST)), np.arange(count) % (LONGEST + 1)
        return np.where(np.arange(LONGEST) < length[:, None], rows, 0)
    return np.where(np.arange(count) > 0, draw.integers(1, TOKENS[name] + 1, count), 0)


def encoded(case: Case) -> dict[str, np.ndarray]:
    """What RecBole's loaders give: ids of the user and the item, those of the history, and how many these are, at least one."""
    draw = np.random.default_rng(5)
    length = np.arange(ROWS) % STEPS + 1
    history = draw.integers(1, TOKENS["item_id"] + 1, (ROWS, STEPS))
    users = draw.integers(0, TOKENS["user_id"] + 1, ROWS)
    if case.config["pooling_mode"] == "max":  # of an empty list RecBole's is -1e9, ours 0
        users = users % LONGEST + 1
    return {
        "user_id": users, "item_id": draw.integers(0, TOKENS["item_id"] + 1, ROWS),
        "item_id_list": np.where(np.arange(STEPS) < length[:, None], history, 0), "item_length": length,
        "neg_item_id_list": np.where(np.arange(STEPS) < length[:, None], history[::-1], 0),
    }  # fmt: skip


def rows(case: Case) -> dict[str, list[Any]]:
    """The same as raw columns; id 0 is a missing value."""
    ids, out = encoded(case), {}
    for name in [*items(case), *(name for name in USER if name in case.fields)]:
        values = catalogue(name)[ids["item_id" if name in ITEM else "user_id"]]
        if name in NUMBERS:
            out[name] = [float(v) for v in values[:, 0]]
        elif name in LISTS:
            out[name] = [[f"{name}-{i}" for i in row if i] for row in values]
        else:
            out[name] = [f"{name}-{i}" if i else None for i in values]
        if name in ITEM:
            lists = zip(catalogue(name)[ids["item_id_list"]], ids["item_length"], strict=True)
            out[f"{name}_list"] = [[f"{name}-{i}" for i in row[:length]] for row, length in lists]
    return out


def spec(case: Case) -> dict[str, Any]:
    features: list[dict[str, Any]] = [
        {"name": f"{name}_list", "table": name, "max_values": STEPS, "scope": "context"} for name in reversed(items(case))
    ]
    for name in [*items(case), *(name for name in USER if name in case.fields)]:
        if name in NUMBERS:
            features.append({"kind": "dense", "name": name})
            continue
        more = {"max_values": LONGEST, "pooling": case.config["pooling_mode"]} if name in LISTS else {}
        features.append({"name": name, "values": "string", "vocabulary": f"{name}.json", **more})
    return {"model": case.model, "features": features, "settings": case.settings}
