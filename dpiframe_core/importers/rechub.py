"""torch-rechub state dicts -> source models: its ranking models WideDeep, DeepFM, DCN and DCNv2.

Its linear part is one layer on the embeddings themselves, which here becomes a weight for each row: w . e. Every hidden layer
has a batch norm. Its DIN is not taken over: its Dice normalises each row by that row's own mean, which is no layer of ours.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM, WideDeep
from dpiframe_core.importers.mapped_rows import mapped_rows
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, SpecFile, read_spec, spec_model
from dpiframe_core.importers.sequential_mlp import activation_kinds, hidden_units, read_linear, read_mlp
from dpiframe_core.importers.source_interactions import (
    CrossMatrix,
    CrossMixture,
    CrossVector,
    factorization_machine,
    read_mixture,
)
from dpiframe_core.importers.source_layers import Linear, Mlp, spread
from dpiframe_core.importers.source_model import Inputs, SourceLayers, SourceModel
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint

Features = Sequence[SparseFeature | DenseFeature]

_PART = 1 << 16


def torch_rechub(checkpoint: Path, spec: Path) -> SourceModel:
    """A state dict of a ranking model of torch-rechub.

    Raises:
        InputError: a file is damaged, they do not fit each other, or hold what a bundle cannot express; by name.
    """
    return read_rechub(read_spec(spec), read_checkpoint(checkpoint))


def read_rechub(file: SpecFile, weights: StateDict) -> SourceModel:
    """As `torch_rechub`, of what it reads."""
    build = file.one_of(_MODELS)
    r = _Reader(file, weights)
    return r.model(build(r))


class _Reader:
    """Features in the order of the model's input (embeddings, then numbers), tables, and MLPs."""

    def __init__(self, file: SpecFile, weights: StateDict) -> None:
        self.file, self.weights, self.where, self.settings = file, weights, file.where, file.settings
        self.features = _sparse_first(file.spec.features)
        self.tables: dict[str, Tensor] = {}
        for f in self.features:
            if isinstance(f, SparseFeature) and (f.table or f.name) not in self.tables:
                self.tables[f.table or f.name] = weights.take(f"embedding.embed_dict.{f.table or f.name}.weight", None, None)
        weights.no_table_left("embedding.embed_dict.", self.where)
        self.first: dict[str, str] = {}

    def dim(self, f: SparseFeature | DenseFeature) -> int:
        return 1 if isinstance(f, DenseFeature) else self.tables[f.table or f.name].shape[1]

    def width(self, features: Features) -> int:
        return sum(map(self.dim, features))

    def part(self, key: str) -> Features:
        """The features of the wide or the deep part, in the order in which the library joins them."""
        names = self.file.spec.wide if key == "wide" else self.file.spec.deep
        if names is None:
            raise InputError(f"{self.where}: {key}", "nothing", f"the features of the {key} part")
        return _sparse_first(self.file.named(names, key))

    def columns(self, features: Features) -> list[int]:
        """Where they lie in the joined input of all features."""
        at, out = 0, {}
        for f in self.features:
            out[f.name] = range(at, at + self.dim(f))
            at += self.dim(f)
        return [k for f in features for k in out[f.name]]

    def mlp(self, prefix: str, features: Features, *, output: bool) -> tuple[Mlp, Linear | None]:
        name = f"{prefix}.mlp"
        units = hidden_units(self.weights, name, output=output)
        where = f"{self.where}: settings.activation"
        kinds = activation_kinds(self.settings.take("activation", str), len(units), where, refused=("dice",))
        return read_mlp(
            self.weights, name, self.width(features), units, kinds, self.where, batch_norm=True, output=int(output)
        )  # fmt: skip

    def linear(self, features: Features) -> Tensor:
        """Takes the linear part as first-order weights; returns its bias."""
        layer = read_linear(self.weights, "linear.fc", self.width(features), 1)
        at = 0
        for f in features:
            weight = layer.weight[0, at : at + self.dim(f)].double()
            at += self.dim(f)
            self.first[f.name] = f"{f.name}.w"
            if isinstance(f, DenseFeature):
                self.tables[f"{f.name}.w"] = weight[None]
            else:
                table = self.tables[f.table or f.name]
                self.tables[f"{f.name}.w"] = mapped_rows(part.double() @ weight[:, None] for part in torch.split(table, _PART))
        assert layer.bias is not None
        self._linear = layer
        return layer.bias.double()

    def wide_logit(self, i: Inputs, features: Features) -> Tensor:
        """As the library computes it: the layer on the embeddings."""
        return self._linear(self.joined(i, features))

    def joined(self, i: Inputs, features: Features) -> Tensor:
        return torch.cat([i.named(f.name) for f in features], 1)

    def model(self, layers: SourceLayers) -> SourceModel:
        return spec_model("torch-rechub", self, self.features, layers)


def _wide_deep(r: _Reader) -> SourceLayers:
    return _with_linear(r, WideDeep, pairwise=False)


def _deepfm(r: _Reader) -> SourceLayers:
    return _with_linear(r, DeepFM, pairwise=True)


def _with_linear(r: _Reader, kind: type[WideDeep] | type[DeepFM], *, pairwise: bool) -> SourceLayers:
    wide, deep = r.part("wide"), r.part("deep")
    if pairwise:
        embedded = {f.name for f in r.features if isinstance(f, SparseFeature)}
        if embedded != {f.name for f in wide}:
            raise InputError(f"{r.where}: wide", [f.name for f in wide], f"the sparse features {sorted(embedded)}, all of them")
    unread = [f.name for f in r.features if f not in wide and f not in deep]
    if unread:
        raise InputError(f"{r.where}: features", ", ".join(unread), "only features of the wide or the deep part")
    bias = r.linear(wide)
    mlp, last = r.mlp("mlp", deep, output=True)
    assert last is not None
    ours, our_last = spread(mlp, last, r.columns(deep), r.width(r.features))
    weight, own = our_last.folded()
    head = Linear(weight, own + bias)

    def logit(i: Inputs) -> Tensor:
        out = r.wide_logit(i, wide) + last(mlp(r.joined(i, deep)))
        return out + factorization_machine(torch.stack([i.named(f.name) for f in wide], 1)) if pairwise else out

    architecture = kind(hidden_units=mlp.units, activation=mlp.activations)
    return SourceLayers(architecture, ours.parameters("deep") | head.parameters("head"), logit)


def _dcn(r: _Reader) -> SourceLayers:
    width, layers = r.width(r.features), r.weights.children("cn.w")
    cross = CrossVector(
        tuple(r.weights.take(f"cn.w.{i}.weight", 1, width)[0] for i in layers),
        tuple(r.weights.take(f"cn.b.{i}", width) for i in layers),
    )
    mlp, _ = r.mlp("mlp", r.features, output=False)
    head = read_linear(r.weights, "linear.fc", width + mlp.units[-1], 1)

    def logit(i: Inputs) -> Tensor:
        x = r.joined(i, r.features)
        return head(torch.cat([cross(x), mlp(x)], 1))

    architecture = DCN(cross_layers=len(layers), hidden_units=mlp.units, activation=mlp.activations)
    return SourceLayers(architecture, cross.parameters("cross") | mlp.parameters("deep") | head.parameters("head"), logit)


def _dcnv2(r: _Reader) -> SourceLayers:
    structure, width = r.settings.take("model_structure", str), r.width(r.features)
    if structure not in ("stacked", "parallel", "crossnet_only"):
        raise InputError(f"{r.where}: settings.model_structure", structure, "stacked, parallel or crossnet_only")
    cross = _mixture(r, width) if r.weights.children("crossnet.u_list") else _matrices(r, width)
    mlp = Mlp(()) if structure == "crossnet_only" else r.mlp(f"{structure}_dnn", r.features, output=False)[0]
    head = read_linear(r.weights, "linear.fc", (mlp.units or (0,))[-1] + (0 if structure == "stacked" else width), 1)

    def logit(i: Inputs) -> Tensor:
        x = r.joined(i, r.features)
        if structure == "stacked":
            return head(mlp(cross(x)))
        return head(torch.cat([cross(x), mlp(x)], 1) if structure == "parallel" else cross(x))

    mixture = isinstance(cross, CrossMixture)
    architecture = DCNv2(
        structure=structure, cross_layers=len(cross.biases), hidden_units=mlp.units, activation=mlp.activations,
        rank=cross.u[0].shape[2] if isinstance(cross, CrossMixture) else None,
        experts=len(cross.gates) if isinstance(cross, CrossMixture) else None, outer_bias=not mixture,
    )  # fmt: skip
    return SourceLayers(architecture, cross.parameters("cross") | mlp.parameters("deep") | head.parameters("head"), logit)


def _matrices(r: _Reader, width: int) -> CrossMatrix:
    layers = r.weights.children("crossnet.w")
    return CrossMatrix(
        tuple(r.weights.take(f"crossnet.w.{i}.weight", width, width) for i in layers),
        tuple(r.weights.take(f"crossnet.b.{i}", width) for i in layers),
        outer_bias=True,
    )


def _mixture(r: _Reader, width: int) -> CrossMixture:
    layers, experts = len(r.weights.children("crossnet.u_list")), len(r.weights.children("crossnet.gating"))
    return read_mixture(r.weights, ("u_list", "v_list", "c_list"), layers, experts, width)


def _sparse_first(features: Features) -> list[SparseFeature | DenseFeature]:
    """The library joins embeddings first, whatever the order of the features."""
    return sorted(features, key=lambda f: isinstance(f, DenseFeature))


_MODELS: Mapping[str, Callable[[_Reader], SourceLayers]] = {
    "WideDeep": _wide_deep,
    "DeepFM": _deepfm,
    "DCN": _dcn,
    "DCNv2": _dcnv2,
}
