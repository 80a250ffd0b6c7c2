"""What FuxiCTR's models have in common, taken from a run's checkpoint: embeddings, linear weights, MLPs, activations."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.importers.fuxictr.features import Field, build_schema, build_vocabularies, fields_of
from dpiframe_core.importers.fuxictr.files import FuxiRun
from dpiframe_core.importers.sequential_mlp import activation_kinds, read_linear, read_mlp, read_norm
from dpiframe_core.importers.source_layers import Activation, Linear, Mlp
from dpiframe_core.importers.source_model import SourceLayers, SourceModel, check_padding, required, tables_in_order
from dpiframe_core.importers.state_dict import StateDict


def read_dice(weights: StateDict, name: str, size: int) -> Activation:
    """fuxictr/pytorch/layers/activations.py: batch norm without weight and bias, epsilon 1e-9."""
    alpha = weights.take(f"{name}.alpha", size)
    return Activation("dice", alpha, read_norm(weights, f"{name}.bn", size, 1e-9, affine=False))


class FuxiReader:
    """What the models have in common: fields, tables and first-order weights of one run."""

    def __init__(self, run: FuxiRun, weights: StateDict, unpooled: Sequence[str] = ()) -> None:
        dim = required(run.config, "embedding_dim", f"{run.files.config}: embedding_dim", (int,))
        assert isinstance(dim, int)
        self.run, self.weights, self.where = run, weights, str(run.files.config)
        self.fields = fields_of(run, dim, unpooled)
        self.tables: dict[str, Tensor] = {}

    def setting(self, key: str, *kinds: type) -> object:
        return required(self.run.config, key, f"{self.where}: {key}", kinds)

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
        return read_linear(self.weights, prefix, width, units)

    def tower(
        self, prefix: str, units: str, activations: str, width: int | None = None, outputs: int = 1
    ) -> tuple[Mlp, Linear]:
        """An MLP over all embeddings, and the linear layer that ends it; `units`, `activations`: their settings."""
        mlp, last = self._mlp(prefix, self.width if width is None else width, units, activations, outputs)
        assert last is not None
        return mlp, last

    def mlp(self, prefix: str, width: int, units: str, activations: str) -> Mlp:
        """An MLP without an output layer."""
        return self._mlp(prefix, width, units, activations, 0)[0]

    def attention(self, prefix: str, dim: int) -> tuple[Mlp, Linear]:
        """The MLP of [q, k, q - k, q * k] and its output layer, which may have an activation."""
        keys = "attention_hidden_units", "attention_hidden_activations"
        mlp, out = self._mlp(prefix, 4 * dim, *keys, 1, batch_norm=False)
        assert out is not None
        return mlp, self.activated(out, "attention_output_activation")

    def activated(self, layer: Linear, key: str) -> Linear:
        """With the activation of a setting that has no parameters."""
        kinds = activation_kinds(self.setting(key, str, type(None)), 1, f"{self.where}: {key}", refused=("prelu", "dice"))
        return replace(layer, activation=Activation(kinds[0]))

    def _mlp(
        self, prefix: str, width: int, units: str, activations: str, outputs: int, *, batch_norm: bool = True
    ) -> tuple[Mlp, Linear | None]:
        sizes, where = self.units(units), f"{self.where}: {activations}"
        kinds = activation_kinds(self.setting(activations, str, list, type(None)), len(sizes), where)
        norm = batch_norm and bool(self.run.config.get("batch_norm", False))
        return read_mlp(
            self.weights, f"{prefix}.mlp", width, sizes, kinds, self.where, batch_norm=norm, output=outputs, dice=read_dice
        )

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

    def model(
        self, name: str, layers: SourceLayers, context: Sequence[str], *, first_order: bool, numbers: bool = True
    ) -> SourceModel:
        self.weights.finish(f"FuxiCTR's {name} with these settings")
        for f in self.fields:
            if f.buckets is not None:  # its ids are places on the number line, not FuxiCTR's
                for table in {f.name, f"{f.name}.w"} & self.tables.keys():
                    self.tables[table] = self.tables[table][list(f.buckets.rows)]
        schema = build_schema(self.run, self.fields, context, first_order, embedded_numbers=numbers)
        labels = self.run.labels
        return SourceModel(
            library="FuxiCTR", model=name, architecture=layers.architecture, schema=schema, dense=layers.dense,
            tables=tables_in_order(schema, self.tables), vocabularies=build_vocabularies(self.run, schema),
            logit=layers.logit, label=labels[0] if labels else None,
        )  # fmt: skip
