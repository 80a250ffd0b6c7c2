"""DLRM state dicts -> source models: TorchRec's DLRM and DLRM_DCN, and facebookresearch/dlrm's DLRM_Net.

Numbers go through a bottom MLP; its output and all embeddings meet in pairwise dots or a cross network of low rank. Sizes are
those of the checkpoint; every activation is ReLU unless the settings say otherwise.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import DLRM, DLRMDCNv2
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, SpecFile, read_spec, spec_model
from dpiframe_core.importers.sequential_mlp import read_linear
from dpiframe_core.importers.source_interactions import CrossLowRank, pairs, pairs_from
from dpiframe_core.importers.source_layers import Activation, Linear, Mlp, with_columns
from dpiframe_core.importers.source_model import Inputs, SourceLayers, SourceModel
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint

_RELU = Activation("relu")


def torchrec(checkpoint: Path, spec: Path) -> SourceModel:
    """TorchRec's DLRM or DLRM_DCN (torchrec/models/dlrm.py), alone or inside DLRMTrain.

    Raises:
        InputError: a file is damaged, they do not fit each other, or hold what a bundle cannot express; by name.
    """
    return read_torchrec(read_spec(spec), read_checkpoint(checkpoint))


def facebook_dlrm(checkpoint: Path, spec: Path) -> SourceModel:
    """facebookresearch/dlrm's DLRM_Net (dlrm_s_pytorch.py). Raises InputError as `torchrec`."""
    return read_facebook(read_spec(spec), read_checkpoint(checkpoint))


def read_torchrec(file: SpecFile, weights: StateDict) -> SourceModel:
    """As `torchrec`, of what it reads."""
    weights = weights.without_prefix("model.")
    r = _Reader(file, weights, ("DLRM", "DLRM_DCN"))
    bag = "sparse_arch.embedding_bag_collection.embedding_bags"
    for f in r.sparse:
        r.table(f, f"{bag}.{f.table or f.name}.weight")
    bottom = r.perceptrons("dense_arch.model._mlp", len(r.numbers))
    if bottom.units[-1] != r.dim:
        raise InputError(f"{weights.where}: dense_arch", f"{bottom.units[-1]} outputs", f"{r.dim}, as the tables have columns")
    dim, fields = r.dim, len(r.sparse) + 1
    weights.drop("inter_arch.triu_indices")
    if file.spec.model == "DLRM":
        top, head = r.over(dim + fields * (fields - 1) // 2)
        return r.dots(bottom, top, head, upper=True, diagonal=False, library="TorchRec")
    width, layers = dim * fields, weights.children("inter_arch.crossnet.bias")
    if not layers:
        raise InputError(f"{weights.where}: inter_arch.crossnet", "no layers", "those of a LowRankCrossNet")
    v = tuple(weights.take(f"inter_arch.crossnet.V_kernels.{i}", None, width) for i in layers)
    u = tuple(weights.take(f"inter_arch.crossnet.W_kernels.{i}", width, len(v[0])) for i in layers)
    cross = CrossLowRank(v, u, tuple(weights.take(f"inter_arch.crossnet.bias.{i}", width) for i in layers))
    top, head = r.over(width)
    architecture = DLRMDCNv2(bottom_units=bottom.units, cross_layers=len(layers), rank=len(v[0]), hidden_units=top.units)

    def logit(i: Inputs) -> Tensor:
        return head(top(cross(r.vectors(i, bottom).flatten(1))))

    dense = bottom.parameters("bottom") | cross.parameters("cross") | top.parameters("deep") | head.parameters("head")
    return r.model("TorchRec", SourceLayers(architecture, dense, logit))


def read_facebook(file: SpecFile, weights: StateDict) -> SourceModel:
    """As `facebook_dlrm`, of what it reads."""
    r = _Reader(file, weights, ("DLRM_Net",))
    operation = r.settings.take("arch_interaction_op", str)
    if operation != "dot":
        raise InputError(f"{file.where}: settings.arch_interaction_op", operation, "dot")
    diagonal = r.settings.take("arch_interaction_itself", bool)
    for k, f in enumerate(r.sparse):
        if f.table is not None:
            raise InputError(f"{file.where}: {f.name}.table", f.table, "none: tables are numbered, one a feature")
        r.table(f, f"emb_l.{k}.weight")
    bottom = r.sequence("bot_l", len(r.numbers))
    fields = len(r.sparse) + 1
    layers = r.sequence("top_l", r.dim + fields * (fields - 1) // 2 + (fields if diagonal else 0)).layers
    head = replace(layers[-1], activation=Activation("identity"))
    if len(head.weight) != 1:
        raise InputError(f"{weights.where}: top_l", f"{len(head.weight)} outputs", "1")
    return r.dots(bottom, Mlp(layers[:-1]), head, upper=False, diagonal=diagonal, library="facebookresearch")


class _Reader:
    """The numbers and tables of a DLRM, in the spec's order, and its MLPs."""

    def __init__(self, file: SpecFile, weights: StateDict, models: tuple[str, ...]) -> None:
        if file.spec.model not in models:
            raise InputError(f"{file.where}: model", file.spec.model or None, f"one of {', '.join(models)}")
        self.file, self.weights, self.settings = file, weights, file.settings
        self.numbers = [f for f in file.spec.features if isinstance(f, DenseFeature)]
        self.sparse = [f for f in file.spec.features if isinstance(f, SparseFeature)]
        for kind, found in (("dense", self.numbers), ("sparse", self.sparse)):
            if not found:
                raise InputError(f"{file.where}: features", f"no {kind} ones", "some, as every DLRM has")
        self.tables: dict[str, Tensor] = {}
        self.first: dict[str, str] = {}

    @property
    def dim(self) -> int:
        return self.tables[self.sparse[0].table or self.sparse[0].name].shape[1]

    def table(self, f: SparseFeature, name: str) -> None:
        table = f.table or f.name
        if table not in self.tables:
            self.tables[table] = self.weights.take(name, None, self.dim if self.tables else None)

    def perceptrons(self, prefix: str, width: int) -> Mlp:
        """TorchRec's MLP: Perceptron modules, each a linear layer and ReLU."""
        layers = []
        for i in self.weights.children(prefix):
            layers.append(replace(read_linear(self.weights, f"{prefix}.{i}._linear", width, None), activation=_RELU))
            width = len(layers[-1].weight)
        return Mlp(tuple(layers))

    def over(self, width: int) -> tuple[Mlp, Linear]:
        """TorchRec's OverArch: an MLP and a linear layer."""
        mlp = self.perceptrons("over_arch.model.0._mlp", width)
        return mlp, read_linear(self.weights, "over_arch.model.1", mlp.units[-1] if mlp.units else width, 1)

    def sequence(self, prefix: str, width: int) -> Mlp:
        """facebookresearch's create_mlp: linear layers and ReLUs in an `nn.Sequential`."""
        layers = []
        for i in self.weights.children(prefix):
            layers.append(replace(read_linear(self.weights, f"{prefix}.{i}", width, None), activation=_RELU))
            width = len(layers[-1].weight)
        if not layers:
            raise InputError(f"{self.weights.where}: {prefix}", "no layers", "at least one")
        return Mlp(tuple(layers))

    def vectors(self, i: Inputs, bottom: Mlp) -> Tensor:
        """float64[n, 1 + F, dim]: the numbers' vector, then the embeddings."""
        z = bottom(torch.cat([i.named(f.name) for f in self.numbers], 1))
        return torch.stack([z, *(i.named(f.name) for f in self.sparse)], 1)

    def dots(self, bottom: Mlp, top: Mlp, head: Linear, *, upper: bool, diagonal: bool, library: str) -> SourceModel:
        """A DLRM of pairwise dots, in the library's order of pairs."""
        dim = self.dim
        order = pairs_from(range(len(self.sparse) + 1), upper=upper, diagonal=diagonal)
        ours, our_head = with_columns(top, head, [*range(dim), *(dim + k for k in order)])
        architecture = DLRM(bottom_units=bottom.units, hidden_units=top.units, self_interaction=diagonal)

        def logit(i: Inputs) -> Tensor:
            vectors = self.vectors(i, bottom)
            return head(top(torch.cat([vectors[:, 0], pairs(vectors, upper=upper, diagonal=diagonal)], 1)))

        dense = bottom.parameters("bottom") | ours.parameters("deep") | our_head.parameters("head")
        return self.model(library, SourceLayers(architecture, dense, logit))

    def model(self, library: str, layers: SourceLayers) -> SourceModel:
        return spec_model(library, self, [*self.numbers, *self.sparse], layers, pooling="sum")
