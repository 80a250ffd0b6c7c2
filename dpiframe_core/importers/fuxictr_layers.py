"""What FuxiCTR's models have in common, taken from a run's checkpoint: embeddings, linear weights, MLPs, activations."""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from dpiframe_core.architecture import Activation as ActivationKind
from dpiframe_core.architecture import Architecture
from dpiframe_core.errors import InputError
from dpiframe_core.importers.fuxictr_features import Field, build_schema, build_vocabularies, fields_of
from dpiframe_core.importers.fuxictr_files import FuxiRun
from dpiframe_core.importers.layers import Activation, BatchNorm, Linear, Mlp, Parameters, one_activation
from dpiframe_core.importers.source import Inputs, SourceModel, check_padding, required, tables_in_order
from dpiframe_core.importers.state_dict import StateDict

Built = tuple[Architecture, Parameters, Callable[[Inputs], Tensor]]

_ACTIVATIONS = {
    "none": "identity", "identity": "identity", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "gelu": "gelu",
    "leakyrelu": "leaky_relu", "prelu": "prelu", "dice": "dice",
}  # fmt: skip


class FuxiReader:
    """What the models have in common: fields, tables and first-order weights of one run."""

    def __init__(self, run: FuxiRun, weights: StateDict, unpooled: Sequence[str] = ()) -> None:
        dim = required(run.config, "embedding_dim", str(run.files.config), (int,))
        assert isinstance(dim, int)
        self.run, self.weights, self.where = run, weights, str(run.files.config)
        self.fields = fields_of(run, dim, unpooled)
        self.tables: dict[str, Tensor] = {}

    def setting(self, key: str, *kinds: type) -> object:
        return required(self.run.config, key, self.where, kinds)

    def units(self, key: str) -> list[int]:
        units = self.setting(key, list)
        assert isinstance(units, list)
        if not all(type(u) is int and u > 0 for u in units):
            raise InputError(f"{self.where}: {key}", units, "a list of positive integers")
        return units

    def count(self, key: str) -> int:
        value = self.setting(key, int)
        assert isinstance(value, int)
        return value

    @property
    def width(self) -> int:
        """Of all embeddings side by side."""
        return sum(f.dim for f in self.fields)

    def linear(self, prefix: str, width: int, units: int) -> Linear:
        return Linear(self.weights.take(f"{prefix}.weight", units, width), self.weights.take(f"{prefix}.bias", units))

    def tower(self, prefix: str, units: str, activations: str) -> tuple[Mlp, Linear]:
        """An MLP over all embeddings, and the linear layer of one unit that ends it."""
        return self._mlp(prefix, self.width, units, activations, output=True)

    def mlp(self, prefix: str, width: int, units: str, activations: str) -> Mlp:
        """An MLP without an output layer; `units`, `activations`: their keys in the configuration."""
        return self._mlp(prefix, width, units, activations, output=False)[0]

    def activation(self, mlp: Mlp, key: str) -> ActivationKind:
        """The one activation of its layers, as our architectures know it."""
        return one_activation([layer.activation for layer in mlp.layers], f"{self.where}: {key}")

    def _mlp(self, prefix: str, width: int, units: str, activations: str, *, output: bool) -> tuple[Mlp, Linear]:
        """`nn.Sequential` of linear, perhaps batch norm, activation, perhaps dropout; only what has parameters has a name."""
        sequence = f"{prefix}.mlp"
        sizes, batch_norm = self.units(units), bool(self.run.config.get("batch_norm", False))
        places = iter(self.weights.children(sequence))

        def place(what: str) -> str:
            at = next(places, None)
            if at is None:
                raise InputError(f"{self.weights.where}: {sequence}", "no further layer", f"{what}, as {self.where} says")
            return f"{sequence}.{at}"

        layers = []
        for size, kind in zip(sizes, self._kinds(activations, len(sizes)), strict=True):
            name = place(f"a linear layer of {size} units")
            weight, bias = self.weights.take(f"{name}.weight", size, width), self.weights.take(f"{name}.bias", size)
            norm = self._norm(place("batch norm"), size) if batch_norm else None
            layers.append(Linear(weight, bias, norm, self._activation(kind, size, place)))
            width = size
        head = self.linear(place("the output layer"), width, 1) if output else Linear(torch.zeros(0, width), None)
        return Mlp(tuple(layers)), head

    def _norm(self, name: str, size: int) -> BatchNorm:
        self.weights.drop(f"{name}.num_batches_tracked")
        mean, variance = (self.weights.take(f"{name}.{part}", size) for part in ("running_mean", "running_var"))
        return BatchNorm(
            mean, variance, self.weights.take(f"{name}.weight", size), self.weights.take(f"{name}.bias", size), 1e-5
        )

    def _kinds(self, key: str, layers: int) -> list[str]:
        """FuxiCTR's names (those of torch.nn but for case, a list or one for all) -> ours."""
        given = self.setting(key, str, list, type(None))
        names = given if isinstance(given, list) else [given] * layers
        if len(names) != layers:
            raise InputError(f"{self.where}: {key}", given, f"one for each of {layers} layers")
        kinds = []
        for name in names:
            kind = _ACTIVATIONS.get(str(name).lower() if name else "none")
            if kind is None or kind not in get_args(ActivationKind):
                raise InputError(f"{self.where}: {key}", name, f"one of {', '.join(_ACTIVATIONS)}")
            kinds.append(kind)
        return kinds

    def _activation(self, kind: str, size: int, place: Callable[[str], str]) -> Activation:
        return Activation(kind)

    def embeddings(self, prefix: str, skip: Sequence[str] = ()) -> None:
        """Takes `prefix`.embedding_layers.NAME.weight of every field but `skip`."""
        for f in self.fields:
            if f.name not in skip:
                self.tables[f.name] = self._embedding(f, f"{prefix}.embedding_layers.{f.name}.weight", f.dim)
                if f.shares is not None and not torch.equal(self.tables.pop(f.name), self.tables[f.shares]):
                    name = f"{prefix}.embedding_layers.{f.name}.weight"
                    raise InputError(f"{self.weights.where}: {name}", "other values", f"those of {f.shares}, which it shares")

    def linear_weights(self, prefix: str) -> None:
        """The first-order weights: an embedding layer of dim 1, which shares none."""
        for f in self.fields:
            name = f"{prefix}.embedding_layer.embedding_layer.embedding_layers.{f.name}.weight"
            self.tables[f"{f.name}.w"] = self._embedding(f, name, 1)

    def _embedding(self, f: Field, name: str, dim: int) -> Tensor:
        if f.kind == "numeric":
            return self.weights.take(name, dim, 1).T
        weight = self.weights.take(name, f.rows, dim)
        if f.kind == "sequence":
            check_padding(f"{self.weights.where}: {name}", weight)
        return weight

    def model(self, name: str, built: Built, context: Sequence[str], *, first_order: bool, numbers: bool = True) -> SourceModel:
        architecture, dense, logit = built
        self.weights.finish(f"FuxiCTR's {name} with these settings")
        schema = build_schema(self.run, self.fields, context, first_order, embedded_numbers=numbers)
        labels = self.run.labels
        return SourceModel(
            "FuxiCTR", name, architecture, schema, dense, tables_in_order(schema, self.tables),
            build_vocabularies(self.run, schema), logit, labels[0] if labels else None,
        )  # fmt: skip
