"""Columns as callers of the encoder have them: lists, and NumPy arrays of every kind and layout, of which some are odd."""

import random
from typing import Any

import numpy as np

Columns = dict[str, Any]

_TEXTS = ["a", "ö", "long text of a value", "", "b", "\x7f", "日本"]
_GOOD: dict[str, list[Any]] = {
    "item": [*_TEXTS, None], "site": [*_TEXTS, None], "strict": ["a", "ö"], "place": [0, 5, 19, 20, 30, None],
    "known": [4, 5, 6, None], "price": [0, 3, 2.5, 100.0, -0.0], "wide": [0, 1, 2.5, -0.0, 1e22, 2**53 + 1, 5e-324, None],
    "step": [0, -1, 2.5, 1e9, None], "tags": [["a"], [], ["a", "b"], ["a", None], None], "user": [*_TEXTS, None],
    "age": [3, -0.0, 1e2, None], "ready": [0, 7, 19], "bag": [[1], [0, 19, 2], [], None, [3, None]],
}  # fmt: skip
_ODD: list[Any] = [
    "\ud800", "x" * 300, True, False, 2**63, 2**64, 2**70, -(2**63), -(2**63) - 1, 10**400, -1, 1e39, 1e300, float("nan"),
    float("inf"), [], {}, None, b"a", np.float32(1.5), np.int64(3), np.str_("a"), np.datetime64("2020-01-01"), 1 + 2j, (1,),
    np.array([1, 2]), np.array(7), object(), np.bool_(True), type("Text", (str,), {})("a"),
    type("Number", (float,), {})(2.5), type("Id", (int,), {})(3), np.float64(2), "",
]  # fmt: skip
_KINDS = [
    "f2", "f4", "f8", "g", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">f4", ">f8", ">i4", ">i8", "?", "c16", "M8[s]",
    "m8[s]", "S", "U", ">U9", "O", "V4", np.dtypes.StringDType(), np.dtypes.StringDType(na_object=None),
    [("a", "<i4"), ("b", "<f4")], "q", "l", "U1",
]  # fmt: skip
_NAMES_OF = {
    "f": ["price", "wide", "step"],
    "i": ["place", "known", "ready", "price", "wide", "step"],
    "U": ["item", "site", "strict"],
}


def columns(rng: random.Random) -> tuple[Columns, Columns, Any]:
    """Candidates, context, and how many candidates each of several contexts has, or None: then there is one."""
    n = rng.choice((1, 1, 2, 3, 4, 17, 33))
    candidates: Columns = {name: rng.choices(values, k=n) for name, values in _GOOD.items() if name not in ("user", "age")}
    context: Columns = {name: rng.choice(_GOOD[name]) for name in ("user", "age")}
    for kind, names in _NAMES_OF.items():
        for name in names:
            if rng.random() < 0.5:
                candidates[name] = _of_kind(rng, rng.choice(_kinds_like(kind)), _plain(candidates[name]))
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        _spoil(rng, candidates, context, n)
    per_context = None
    if rng.random() < 0.15:
        per_context = np.array(rng.choices(range(3), k=n), np.int64)
        candidates = {name: values for name, values in candidates.items() if name != "user"}
        per_context[0] += n - per_context.sum()
        if per_context[0] < 0:
            per_context = np.ones(n, np.int64)
        context = {name: rng.choices(_GOOD[name], k=n) for name in ("user", "age")}
        if rng.random() < 0.3:
            context["age"] = _of_kind(rng, rng.choice(_KINDS), _plain(context["age"]))
    elif rng.random() < 0.1:
        candidates["user"] = _of_kind(rng, rng.choice(_KINDS), rng.choices(_TEXTS, k=n))
        context.pop("user", None)
    return candidates, context, per_context


def _kinds_like(kind: str) -> list[Any]:
    return {"f": ["f4", "f8", "f2", ">f4"], "i": ["i4", "i8", "u1", ">i8", "i2"], "U": ["U", "O", ">U9"]}[kind]


def _plain(values: list[Any]) -> list[Any]:
    """Without null, which most arrays cannot hold."""
    return [v if v is not None else next((w for w in values if w is not None), 0) for v in values]


def _spoil(rng: random.Random, candidates: Columns, context: Columns, n: int) -> None:
    name = rng.choice(list(candidates))
    values = rng.choices(_GOOD[name], k=n)
    match rng.randrange(6):
        case 0:
            candidates[name] = _of_kind(rng, rng.choice(_KINDS), _plain(values))
        case 1:
            values[rng.randrange(n)] = rng.choice(_ODD)
            candidates[name] = values if rng.random() < 0.5 else _objects(values)
        case 2:
            candidates[name] = rng.choice([tuple(values), None, 5, "text", np.array(3), values[:-1], range(n)])
        case 3:
            shape = rng.choice([(n, 1), (1, n), (n, 2), (0,), (n, 0), (2, n)])
            candidates[name] = np.zeros(shape, rng.choice(["f4", "i8", "U1", "O"]), order=rng.choice("CF"))
        case 4:
            context[rng.choice(("user", "age"))] = rng.choice(_ODD)
        case _:
            candidates[name] = np.ma.masked_array(_of_kind(rng, rng.choice(["f4", "i8", "U"]), _plain(values)))


def _objects(values: list[Any]) -> Any:
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def _of_kind(rng: random.Random, kind: Any, values: list[Any]) -> Any:
    """An array of the values, or of others where it cannot hold them; laid out in any way."""
    try:
        with np.errstate(all="ignore"):
            array = np.array(values, kind)
    except (ValueError, TypeError, OverflowError):
        array = np.zeros(len(values), kind)
    return array if array.ndim != 1 or not len(array) else _laid_out(rng, array)


def _laid_out(rng: random.Random, array: Any) -> Any:
    n = len(array)
    match rng.randrange(10):
        case 0:
            wide = np.empty(2 * n, array.dtype)
            wide[::2] = array
            return wide[::2]
        case 1:
            return array[::-1]
        case 2:
            return np.broadcast_to(array[:1], (n,))
        case 3:
            array.flags.writeable = False
            return array
        case 4 if array.dtype.kind in "iuf" and array.dtype.itemsize > 1:
            whole = bytearray(array.nbytes + 1)
            whole[1:] = array.tobytes()
            return np.ndarray((n,), array.dtype, whole, 1)  # begins at an odd byte
        case 5:
            return array.view(np.recarray) if array.dtype.names is None and not array.dtype.hasobject else array
        case 6:
            return np.stack([array, array], 1)[:, 0]
        case _:
            return array
