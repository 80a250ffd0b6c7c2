"""What a model is a function of: its parameters by their names, its settings, its features and one batch.

    def fm(m: Net) -> Tensor:
        return m.first_order("fm.lr_layer") + pair_sum(m.fields())

A parameter is read by the name that the checkpoint has. What no function read is refused at the end, by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.errors import InputError, listed
from dpiframe_core.importers.source_model import required

_EPSILON = 1e-5  # of nn.BatchNorm1d and nn.LayerNorm, which FuxiCTR sets nowhere
PADDING = 0  # FuxiCTR's id of an absent value of a sequence


@dataclass(frozen=True, slots=True)
class Embedded:
    """A feature as the models read it.

    Attributes:
        kind: "numeric", "categorical" or "sequence". shares: the feature whose table it reads, if not its own.
        pooling: of a sequence; None: it is read step by step. source: whose it is, as the feature map says ("user", "item").
    """

    name: str
    kind: str
    shares: str | None
    pooling: Literal["mean", "sum", "max"] | None
    source: str


def table_of(parameter: str) -> str | None:
    """The feature whose table it is, by its name `..embedding_layers.FEATURE.weight` (DMR's second one:
    `output_emb_layer.FEATURE.weight`); None of another parameter.
    """
    layers, feature, last = ("", "", *parameter.split("."))[-3:]
    return feature if layers in ("embedding_layers", "output_emb_layer") and last == "weight" else None


class Net:
    """One call of a model on a batch.

    Attributes:
        features: in FuxiCTR's order. values: feature -> int64[n] or [n, longest] ids, float32[n] numbers.
        read, skipped: names of the parameters read so far, and of those that no score reads.
        features_read, first_order_read: of the features whose embeddings, and whose linear weights were.
        defaults: settings that the configuration does not name, with what was taken for each.
        where: the run's configuration, for errors.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], checkpoint: str, settings: Mapping[str, object], where: str,
        features: Sequence[Embedded],
        values: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self._weights, self._checkpoint, self._settings, self.where = weights, checkpoint, settings, where
        self.features, self.values = features, values
        self.read: set[str] = set()
        self.skipped: set[str] = set()
        self.features_read: set[str] = set()
        self.first_order_read: set[str] = set()
        self.defaults: dict[str, object] = {}

    # Settings and parameters.

    def setting(self, key: str, default: object, *kinds: type) -> object:
        """A hyper-parameter; `default`: what the library's constructor has, if the configuration does not name it.

        Raises:
            InputError: it is of none of `kinds`.
        """
        if key not in self._settings:
            self.defaults[key] = default
            return default
        return required(self._settings, key, f"{self.where}: {key}", kinds)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.setting(key, default, bool, int))

    def count(self, key: str, default: int) -> int:
        value = self.setting(key, default, int)
        assert isinstance(value, int)
        return value

    def choice(self, key: str, default: str, *among: str) -> str:
        """One of several words. Raises InputError for another one."""
        value = self.setting(key, default, str)
        if value not in among:
            raise InputError(f"{self.where}: {key}", value, f"one of {', '.join(among)}")
        assert isinstance(value, str)
        return value

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a parameter of this name, or any below it."""
        return name in self._weights or any(other.startswith(f"{name}.") for other in self._weights)

    def parameter(self, name: str) -> Tensor:
        """float32, as the checkpoint has it.

        Raises:
            InputError: it has none of that name.
        """
        if name not in self._weights:
            near = [other for other in self._weights if other.split(".")[0] == name.split(".")[0]]
            raise InputError(
                f"{self._checkpoint}: {name}", "no such parameter", f"it, beside {listed(near or list(self._weights))}"
            )
        self.read.add(name)
        return self._weights[name]

    def peek(self, name: str) -> Tensor:
        """As `parameter`, to ask for its shape: it is not read."""
        return self._weights[name]

    def children(self, prefix: str) -> list[int]:
        """The numbers that follow `prefix.`, ascending: the layers of an `nn.Sequential` or `nn.ModuleList`."""
        heads = {n.removeprefix(f"{prefix}.").split(".")[0] for n in self._weights if n.startswith(f"{prefix}.")}
        return sorted(int(head) for head in heads if head.isdecimal())

    def skip(self, *prefixes: str) -> None:
        """Leaves out what no score reads: every parameter of these names and below them."""
        for prefix in prefixes:
            self.skipped.update(n for n in self._weights if n == prefix or n.startswith(f"{prefix}."))

    # Features.

    def embedding(self, feature: Embedded, layer: str, *, first_order: bool = False) -> Tensor:
        """[n, dim] of a feature, [n, longest, dim] of a sequence without a pooling. `layer`: of FuxiCTR's, a dictionary."""
        (self.first_order_read if first_order else self.features_read).add(feature.name)
        name = feature.name if first_order or feature.shares is None else feature.shares
        weight, values = self.parameter(f"{layer}.embedding_layers.{name}.weight"), self.values[feature.name]
        if feature.shares is not None and not first_order:
            self.skip(f"{layer}.embedding_layers.{feature.name}")
        if feature.kind == "numeric":
            return functional.linear(values[:, None], weight)
        if feature.kind == "categorical":
            return functional.embedding(values, weight)
        pooling = "sum" if first_order else feature.pooling
        if pooling is None:
            return functional.embedding(values, weight, padding_idx=PADDING)
        return functional.embedding_bag(values, weight, mode=pooling, padding_idx=PADDING)

    def fields(self, layer: str = "embedding_layer") -> Tensor:
        """[n, fields, dim]: every feature's embedding."""
        return torch.stack(self.vectors(layer), 1)

    def vectors(self, layer: str = "embedding_layer", only: Sequence[str] | None = None) -> list[Tensor]:
        """[n, dim] of each feature, or of those named, in FuxiCTR's order."""
        wanted = [f for f in self.features if only is None or f.name in only]
        inner = f"{layer}.embedding_layer"
        return [self.embedding(f, inner if self.has(inner) else layer) for f in wanted]

    def of_source(self, source: str) -> list[Tensor]:
        """[n, dim] of each feature whose `source` in the feature map is this one; at least one."""
        names = [f.name for f in self.features if f.source == source]
        if not names:
            raise InputError(f"{self.where}: feature_cols", f"no feature of source {source!r}", "at least one")
        return self.vectors(only=names)

    def joined(self, names: Sequence[str]) -> Tensor:
        """[n, sum of dims] (of sequences without a pooling, [n, longest, sum]) of the features named, in that order.

        Of a model whose embedding layer is the dictionary itself.
        """
        by_name = {f.name: f for f in self.features}
        return torch.cat([self.embedding(by_name[name], "embedding_layer") for name in names], -1)

    def x(self, layer: str = "embedding_layer") -> Tensor:
        """[n, sum of dims]: the same side by side."""
        return torch.cat(self.vectors(layer), 1)

    def first_order(self, layer: str) -> Tensor:
        """[n, 1]: the sum of the features' linear weights, with the bias if there is one."""
        inner = f"{layer}.embedding_layer"
        inner = f"{inner}.embedding_layer" if self.has(f"{inner}.embedding_layer") else inner
        total = torch.cat([self.embedding(f, inner, first_order=True) for f in self.features], 1).sum(1, keepdim=True)
        return total + self.parameter(f"{layer}.bias") if self.has(f"{layer}.bias") else total

    # Layers.

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T (+ b, if there is one)."""
        bias = self.parameter(f"{name}.bias") if self.has(f"{name}.bias") else None
        return functional.linear(x, self.parameter(f"{name}.weight"), bias)

    def batch_norm(self, name: str, x: Tensor) -> Tensor:
        """By the statistics kept in training, along dimension 1, as nn.BatchNorm1d."""
        mean, variance = self.parameter(f"{name}.running_mean"), self.parameter(f"{name}.running_var")
        weight, bias = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=_EPSILON)

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.parameter(f"{name}.weight")
        return functional.layer_norm(x, weight.shape, weight, self.parameter(f"{name}.bias"), _EPSILON)


Logit = Callable[[Net], Tensor]  # of a model: [n, tasks]
