"""Calls on raw inputs: how ids reach their lookups, and numbers the rest of the model. Between lie views and offsets."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from dpiframe_core.compiler.lookups import CONSTANT, Bags, Lookups, Raw, Slot
from dpiframe_core.compiler.operations.arguments import Arguments
from dpiframe_core.compiler.operations.emit import Const, Emitter
from dpiframe_core.compiler.operations.joins import cat
from dpiframe_core.compiler.operations.positions import RowStarts, one_hot_rows
from dpiframe_core.compiler.operations.reductions import reduced
from dpiframe_core.compiler.operations.strided import BATCH, Atom, Refused, Size, Strided, squeezed
from dpiframe_core.compiler.views import INTEGERS, SAME, raw_view
from dpiframe_core.features.schema import Categorical, Feature

_COMPARISONS = {f"aten.{op}.{kind}" for op in ("eq", "ne") for kind in ("Scalar", "Tensor")} | {
    "aten.gt.Scalar",
    "aten.ge.Scalar",
    "aten.lt.Scalar",
    "aten.le.Scalar",
}
_OPPOSITES = {"aten.lt.Scalar": "aten.ge.Scalar", "aten.le.Scalar": "aten.gt.Scalar"}


class RawInputs:
    """Gives values to calls whose arguments are raw inputs, and tells `lookups` what they read."""

    def __init__(self, emitter: Emitter, lookups: Lookups) -> None:
        self._emitter, self._lookups = emitter, lookups

    def value(self, target: str, a: Arguments, sizes: Sequence[Size], found: Any) -> Any:
        """What a call with raw inputs among its arguments gives; None: it takes them as numbers."""
        look = self._lookups
        if target == "aten.embedding.default" and isinstance(a["indices"], Raw):
            return self._embedding(a["indices"], _weight(a["weight"]), a["padding_idx"])
        index = a["indices"][0] if target == "aten.index.Tensor" and len(a["indices"]) == 1 else a.get("index")
        if target in ("aten.index.Tensor", "aten.index_select.default") and isinstance(index, Raw) and not a.get("dim"):
            return self._chosen(index, _weight(a["self"]))
        if target == "aten.one_hot.default" and self._is_ids(a["self"]):
            return self._embedding(a["self"], one_hot_rows(a["num_classes"]), -1)
        if "embedding_bag" in target and isinstance(a["indices"], Raw):
            return (self._embedding_bag(a), None, None, None)
        raws = [v for v in a.values() if isinstance(v, Raw)]
        if target in _COMPARISONS and self._is_ids(raws[0]):
            return self._mask(target, a)
        if target in SAME and found.dtype == torch.bool and self._is_ids(raws[0]):
            return self._mask("aten.ne.Scalar", {"self": a["self"], "other": 0})
        if target == "aten.linear.default" and a["bias"] is None and a["input"].at.shape == (1,) and not a["input"].flat:
            weight = _weight(a["weight"])
            slot = look.scaled(int(a["input"].at[0]), weight.name or "", weight.tensor)
            if slot is not None:
                return self._slots([slot], (slot.width,))
        x = raws[0] if raws else None
        if target in ("aten.add.Tensor", "aten.sub.Tensor") and x is not None and len(raws) == 1 and self._is_ids(x):
            other = a["other"] if x is a["self"] else a["self"]
            if x is not a["self"] and "sub" in target:
                raise Refused("got ids subtracted from something, expected ids plus constants")
            return self._shifted(x, other, -1 if "sub" in target else 1)
        if x is not None and len(raws) == 1 and x is next(v for v in a.values() if isinstance(v, Raw | Strided)):
            ids = self._is_ids(x)
            if target in SAME and not ids and found.dtype in INTEGERS:
                return None
            if target in SAME and not ids and found.dtype not in (torch.float32, torch.float64):
                raise Refused(f"got numbers cast to {found.dtype}, expected float32; ids are those of categorical features")
            seen = raw_view(target, x, a, sizes)
            if seen is not None:
                return [_settled(part) for part in seen] if isinstance(seen, list) else _settled(seen)
        if target in ("aten.cat.default", "aten.stack.default"):
            return self._joined(target, a["tensors"], a["dim"])
        return None

    def as_numbers(self, value: Any) -> Any:
        """Raw numbers (also those in a list) as columns of the graph's input; all else as it is."""
        if isinstance(value, list | tuple):
            return [self.as_numbers(v) for v in value]
        return self._numbers(value) if isinstance(value, Raw) else value

    def _is_ids(self, x: Raw) -> bool:
        return any(f.is_id for f in self._features(x))

    def _features(self, x: Raw) -> list[Feature]:
        names = {self._lookups.columns[at][0] for at in x.at.flatten().tolist() if at != CONSTANT}
        return [self._lookups.schema.feature(name) for name in names]

    def _numbers(self, x: Raw) -> Strided:
        if x.flat:
            raise Refused("got rows joined into one dimension, expected each row to be computed from itself")
        if CONSTANT not in x.at:
            return self._slots([self._lookups.number(int(at)) for at in x.at.flat], x.at.shape)
        pairs = zip(x.at.flat, x.shift.flat, strict=True)
        parts = [
            Const(torch.tensor([[float(c)]])) if at == CONSTANT else self._slots([self._lookups.number(int(at))], (1,))
            for at, c in pairs
        ]
        return self._emitter.view(cat(self._emitter, parts, 1), [Size(1, True), *map(Size, x.at.shape)])

    def _joined(self, target: str, tensors: Sequence[Any], dim: int) -> Raw | None:
        """Numbers may stand beside constants: RecBole gives each the index of its row."""
        found = [_constants(t) if isinstance(t, Const) else t for t in tensors]
        parts = [t for t in found if isinstance(t, Raw)]
        if len(parts) < len(found) or (parts != list(tensors) and any(self._is_ids(p) for p in parts)):
            return None
        dim %= parts[0].at.ndim + 1 + ("stack" in target)
        if dim == 0 or any(p.flat for p in parts):
            raise Refused("got rows put behind rows, expected each row to be computed from itself")
        join = np.stack if "stack" in target else np.concatenate
        return Raw(join([p.at for p in parts], dim - 1), join([p.shift for p in parts], dim - 1))

    def _shifted(self, x: Raw, other: Any, sign: int) -> Raw:
        shift = other.tensor.numpy() if isinstance(other, Const) else np.array(other)
        if not np.issubdtype(shift.dtype, np.integer):
            raise Refused("got ids plus a value, expected ids plus constant integers")
        if shift.ndim > x.at.ndim:
            shift = shift.reshape(shift.shape[1:])
        if np.broadcast_shapes(x.shift.shape, shift.shape) != x.at.shape:
            raise Refused(f"got ids of sizes {x.at.shape} plus {shift.shape} constants, expected as many ids as constants")
        return Raw(x.at, np.broadcast_to(x.shift + sign * shift, x.at.shape), x.flat)

    def _embedding(self, raw: Raw, weight: Const, padding: int) -> Any:
        if raw.flat:
            raise Refused("got rows joined into one dimension, expected [rows, ..] ids")
        name = weight.name or ""
        bags = self._lookups.bag(raw, name, weight.tensor, padding if padding >= 0 else None, sums=True)
        if bags:
            if raw.at.ndim != 1:
                raise Refused(f"got ids of sizes {raw.at.shape} a row of feature {bags.feature!r}, expected [rows, values]")
            return bags
        end = self._lookups.ended(raw, name, weight.tensor, padding if padding >= 0 else None)
        found = self._slots(self._lookups.embedded(raw, name, weight.tensor), (*raw.at.shape, weight.tensor.shape[1]))
        if end is None:
            return found
        there = replace(self._slots(self._lookups.there(raw), (*raw.at.shape, 1)), boolean=True)
        return self._emitter.elementwise("aten.where", [there, found, Const(weight.tensor[end])])

    def _chosen(self, raw: Raw, weight: Const) -> Any:
        """weight[ids], which may have any sizes behind the first."""
        if weight.batch_dim is not None or not self._is_ids(raw):
            raise Refused("got an index by numbers of the request, expected ids, or positions that are computed")
        below = weight.tensor.shape[1:]
        found = self._embedding(raw, replace(weight, tensor=weight.tensor.reshape(len(weight.tensor), -1)), -1)
        if len(below) == 1 or not isinstance(found, Strided):
            return found
        return self._emitter.view(found, [Size(1, True), *map(Size, (*raw.at.shape, *below))])

    def _embedding_bag(self, a: Arguments) -> Strided:
        raw, weight, starts = a["indices"], _weight(a["weight"]), a["offsets"]
        if not isinstance(starts, RowStarts) or a["per_sample_weights"] is not None or a["include_last_offset"]:
            raise Refused("got bags of their own sizes or weights, expected embedding_bag of ids [rows, values]")
        mode, name, width = ("sum", "mean", "max")[a["mode"]], weight.name or "", weight.tensor.shape[1]
        padding = a.get("padding_idx", -1)
        ids = raw.at.reshape(-1, starts.step)
        made = []
        for i in range(len(ids)):
            row = Raw(ids[i], raw.shift.reshape(ids.shape)[i])
            whole = padding is not None and padding >= 0
            bags = self._lookups.bag(row, name, weight.tensor, padding if whole else None, sums=False, mode=mode)
            if bags:
                made.append(self._slots([bags.slot], (1, width)))
                continue
            if mode == "max":
                raise Refused(
                    "got pooling 'max' of features of one value, expected sum or mean, or one feature of several values"
                )
            if whole and (mode == "mean" or weight.tensor[padding].any()):
                raise Refused("got a padding_idx for features of one value, expected none: every id is read")
            each = self._slots(self._lookups.embedded(row, name, weight.tensor), (starts.step, width))
            made.append(reduced(self._emitter, f"aten.{mode}", each, [1], keep=True))
        joined = cat(self._emitter, made, 1)
        return squeezed(joined, [1]) if len(ids) == 1 else joined

    def bags(self, target: str, a: Arguments) -> Any:
        """The sum over the values of a feature, which alone may be done with their embeddings."""
        bags = next((v for v in a.values() if isinstance(v, Bags)), None)
        if bags is not None and target in SAME:
            return bags
        if bags is not None and target == "aten.sum.dim_IntList" and list(a["dim"]) in ([1], [-2]):
            width = bags.slot.width
            return self._slots([bags.slot], (1, width) if a["keepdim"] else (width,))
        expected = "the sum over its values, or nn.EmbeddingBag; pooling 'none' in the schema leaves the values to the module"
        raise Refused(f"got {target} of a feature of several values, expected {expected}")

    def _mask(self, target: str, a: Arguments) -> Strided | Const:
        """Whether each id is there, or lacks, from its comparison with the id that says so."""
        if target in _OPPOSITES:
            there = self._mask(_OPPOSITES[target], a)
            if isinstance(there, Const):
                return replace(there, tensor=~there.tensor)
            return replace(self._emitter.elementwise("aten.logical_not", [there]), boolean=True)
        x, value = a["self"], a["other"]
        least = {"aten.gt.Scalar": 0, "aten.ge.Scalar": 1}.get(target)
        if isinstance(value, Const) and value.tensor.ndim == 0:
            value = value.tensor.item()
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(x, Raw) and not x.flat and isinstance(value, int) and value < (least or 0):
            always = torch.full((1, *x.at.shape), not target.startswith("aten.eq"))
            return Const(always, batch_dim=0)  # no embedding takes an id below 0
        apart = self._apart(x) if isinstance(x, Raw) else []
        if len(apart) > 1:  # a history and what stands behind it, say
            masks = [self._mask(target, {**a, "self": part}) for part in apart]
            return replace(cat(self._emitter, masks, 1), boolean=True)
        table = self._table_of_one_value(x) if isinstance(x, Raw) else None
        if table is not None and isinstance(value, int):
            name = target.split(".")[1]
            truths = getattr(torch, name)(torch.arange(self._lookups.schema.table(table).rows), value)
            chosen = self._embedding(x, Const(truths[:, None].float(), f"{table} {name} {value}"), -1)
            return replace(self._emitter.view(chosen, [Size(1, True), *map(Size, x.at.shape)]), boolean=True)
        if not isinstance(x, Raw) or x.flat or not isinstance(value, int) or (least is not None and value != least):
            raise Refused(
                "got a comparison of ids, expected `ids != n`, `ids == n` or `ids > 0` with the id of an absent value "
                "(of several ids: `(x == a) | (x == b)`)"
            )
        there = self._slots(self._lookups.mask(x, value if least is None else 0), x.at.shape)
        there = replace(there, boolean=True)
        return self._emitter.elementwise("aten.logical_not", [there]) if target.startswith("aten.eq") else there

    def _apart(self, x: Raw) -> list[Raw]:
        """Ids of a row that lie side by side, cut where those of one table, or a sequence, end."""
        if x.flat or x.at.ndim != 1 or (x.at == CONSTANT).any():
            return [x]
        features = [self._lookups.schema.feature(self._lookups.columns[at][0]) for at in x.at.tolist()]
        kinds = [(f.max_values > 1, f.name if f.max_values > 1 else f.table) for f in features]
        ends = [i for i in range(1, len(kinds) + 1) if i == len(kinds) or kinds[i] != kinds[i - 1]]
        return [Raw(x.at[first:end], x.shift[first:end]) for first, end in pairwise([0, *ends])]

    def _table_of_one_value(self, x: Raw) -> str | None:
        """The table of ids that are all of features of one value, as they come."""
        found = self._features(x)
        if x.flat or x.shift.any() or (x.at == CONSTANT).any() or any(f.max_values > 1 for f in found):
            return None
        tables = {f.table for f in found if isinstance(f, Categorical)}
        return tables.pop() if len(tables) == 1 else None

    def _slots(self, slots: Sequence[Slot], sizes: Sequence[int]) -> Strided:
        """The columns of some embeddings, of one width, as a tensor [B, *sizes]."""
        first, width = slots[0], slots[0].width
        step, *others = {b.offset - a.offset for a, b in pairwise(slots)} or {0}
        if not others and step >= width and len({s.base for s in slots}) == 1:  # evenly spaced: a sequence's values
            dims = ((BATCH,), (Atom(len(slots), step),), (Atom(width, 1),) if width > 1 else ())
            return self._emitter.view(Strided(first.base, dims, first.offset), [Size(1, True), *map(Size, sizes)])
        parts = [Strided(s.base, ((BATCH,), (Atom(s.width, 1),) if s.width > 1 else ()), s.offset) for s in slots]
        joined = parts[0] if len(parts) == 1 else cat(self._emitter, parts, 1)
        return self._emitter.view(joined, [Size(1, True), *map(Size, sizes)])


def _constants(c: Const) -> Raw | None:
    """Whole numbers that do not depend on the inputs, as elements of a row."""
    if c.batch_dim != 0 or not torch.equal(c.tensor, c.tensor.round()):
        return None
    values = c.tensor[0].numpy().astype(np.int64)
    return Raw(np.full_like(values, CONSTANT), values)


def _settled(x: Raw) -> Raw | Const:
    """Where nothing but constants is left, these."""
    if x.flat or not x.at.size or (x.at != CONSTANT).any():
        return x
    return Const(torch.from_numpy(x.shift.astype(np.float32))[None], batch_dim=0)


def _weight(value: Any) -> Const:
    if not isinstance(value, Const):
        raise Refused("got a table that is computed from the inputs, expected a parameter")
    return value if value.name else Const(value.tensor, "a computed table")
