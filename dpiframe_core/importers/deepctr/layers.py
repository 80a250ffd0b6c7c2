"""What DeepCTR-Torch's models have in common, taken from a state dict: embeddings, the linear model, DNNs, the output bias."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, SpecFile, spec_model
from dpiframe_core.importers.sequential_mlp import activation_kinds, read_linear, read_norm, read_prelu
from dpiframe_core.importers.source_layers import Activation, Linear, Mlp, side_by_side
from dpiframe_core.importers.source_model import Inputs, SourceLayers, SourceModel
from dpiframe_core.importers.state_dict import StateDict


def read_dice(weights: StateDict, name: str, size: int) -> Activation:
    """deepctr_torch/layers/activation.py: batch norm with weight and bias, epsilon 1e-8; alpha [units, 1] in attention."""
    flat = weights.shape(f"{name}.alpha") == (size,)
    alpha = weights.take(f"{name}.alpha", *((size,) if flat else (size, 1)))
    return Activation("dice", alpha.reshape(-1), read_norm(weights, f"{name}.bn", size, 1e-8))


class DeepCtrReader:
    """One model's features in the order of its deep input, and its parameters as they are taken.

    Attributes:
        deep: single categories, then pooled lists, then numbers, as the library joins them. embedded: those with a table.
        bias: the output layer's.
    """

    def __init__(self, file: SpecFile, weights: StateDict) -> None:
        self.file, self.weights, self.where = file, weights, file.where
        self.settings = file.settings
        given = file.named(file.spec.deep, "deep")
        single = [f for f in given if isinstance(f, SparseFeature) and f.max_values == 1]
        lists = [f for f in given if isinstance(f, SparseFeature) and f.max_values > 1]
        self.numbers = [f for f in given if isinstance(f, DenseFeature)]
        self.embedded: list[SparseFeature] = [*single, *lists]
        self._wide = file.named(file.spec.wide, "wide")
        for f in self._wide:
            if f.name not in {d.name for d in given}:
                raise InputError(f"{self.where}: wide", f.name, "features that the deep part has too")
        self.tables: dict[str, Tensor] = {}
        for f in self.embedded:
            table = f.table or f.name
            if table not in self.tables:
                self.tables[table] = weights.take(f"embedding_dict.{table}.weight", None, None)
        weights.no_table_left("embedding_dict.", self.where)
        self.first: dict[str, str] = {}
        self.bias = weights.take("out.bias", 1).double()

    @property
    def deep(self) -> list[SparseFeature | DenseFeature]:
        return [*self.embedded, *self.numbers]

    def dim(self, feature: str) -> int:
        (f,) = (f for f in self.embedded if f.name == feature)
        return self.tables[f.table or f.name].shape[1]

    @property
    def width(self) -> int:
        """Of the deep input."""
        return sum(self.dim(f.name) for f in self.embedded) + len(self.numbers)

    def histories_last(self, names: Sequence[str]) -> None:
        """DIN joins what attention gives behind the other embeddings; its features stay sequences."""
        others = [f for f in self.embedded if f.name not in names]
        histories = [f for f in self.embedded if f.name in names]
        self.embedded = [*others, *(f.model_copy(update={"pooling": "none"}) for f in histories)]

    def linear_model(self, *, required: bool) -> bool:
        """Takes the linear model's weights, if it has features; `required`: the architecture has no form without it."""
        if required and not self._wide:
            raise InputError(f"{self.where}: wide", [], f"features of the linear part, which a {self.file.spec.model} has")
        for f in self._wide:
            if isinstance(f, SparseFeature):
                table = f.table or f.name
                if f"{table}.w" not in self.tables:
                    rows = len(self.tables[table])
                    self.tables[f"{table}.w"] = self.weights.take(f"linear_model.embedding_dict.{table}.weight", rows, 1)
                self.first[f.name] = f"{table}.w"
        numbers = [f.name for f in self._wide if isinstance(f, DenseFeature)]
        if numbers:
            weight = self.weights.take("linear_model.weight", len(numbers), 1)
            for name, one in zip(numbers, weight, strict=True):
                self.tables[f"{name}.w"], self.first[name] = one[None, :], f"{name}.w"
        return bool(self._wide)

    def tower(self) -> tuple[Mlp, Linear]:
        """The DNN over the deep input, and the linear layer that ends it."""
        mlp = self.mlp()
        return mlp, read_linear(self.weights, "dnn_linear", mlp.units[-1], 1, bias=False)

    def mlp(self, prefix: str = "dnn", width: int | None = None, setting: str = "dnn_activation") -> Mlp:
        """A `DNN` module: lists of linear layers, of batch norms and of activations."""
        width = self.width if width is None else width
        count = len(self.weights.children(f"{prefix}.linears"))
        if not count:
            raise InputError(f"{self.weights.where}: {prefix}.linears", "no layers", "at least one")
        kinds = activation_kinds(self.settings.take(setting, str), count, f"{self.where}: settings.{setting}")
        normed, layers = bool(self.weights.children(f"{prefix}.bn")), []
        for i, kind in enumerate(kinds):
            layer = read_linear(self.weights, f"{prefix}.linears.{i}", width, None)
            width, name = len(layer.weight), f"{prefix}.activation_layers.{i}"
            norm = read_norm(self.weights, f"{prefix}.bn.{i}", width) if normed else None
            activation = Activation(kind)
            if kind == "prelu":
                activation = read_prelu(self.weights, name, width)
            elif kind == "dice":
                activation = read_dice(self.weights, name, width)
            layers.append(replace(layer, norm=norm, activation=activation))
        return Mlp(tuple(layers))

    def head(self, parts: Sequence[Linear]) -> Linear:
        """The linear layers side by side, and the output layer's bias."""
        joined = side_by_side(parts)
        return Linear(joined.folded()[0], joined.folded()[1] + self.bias)

    def first_order(self, i: Inputs) -> Tensor:
        """The linear model's logit; zero without it."""
        return i.first_order() if self.first else torch.zeros(1, 1, dtype=torch.float64)

    def fields(self, i: Inputs) -> Tensor:
        return torch.stack([i.named(f.name) for f in self.embedded], 1)

    def deep_input(self, i: Inputs, interest: Tensor | None = None) -> Tensor:
        """Embeddings, what attention gives, numbers."""
        parts = [i.named(f.name) for f in self.embedded if f.pooling != "none" or f.max_values == 1]
        return torch.cat([*parts, *([] if interest is None else [interest]), *(i.named(f.name) for f in self.numbers)], 1)

    def model(self, layers: SourceLayers) -> SourceModel:
        return spec_model("DeepCTR-Torch", self, self.deep, layers)
