"""Hyper-parameters of each model that a bundle may hold. Pure data; `models` turns them into op graphs.

`docs/models.md` lists what each model's parameters are called. Dropout, batch normalisation (`batch_norm`) and a missing bias
have no place here: they are gone, folded into weights, or zero.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpiframe_core.strict import Name, Strict


class LeakyReLU(Strict):
    """x < 0: slope * x."""

    type: Literal["leaky_relu"] = "leaky_relu"
    slope: float = 0.01


Plain = Literal["relu", "sigmoid", "tanh", "identity", "gelu", "gelu_tanh"]
Activation = Plain | Literal["prelu", "dice"] | LeakyReLU
Activations = Activation | tuple[Activation, ...]  # of all layers, or of each
Count = Annotated[int, Field(ge=1)]
Units = tuple[Count, ...]
SomeUnits = Annotated[Units, Field(min_length=1)]
Layers = Annotated[int, Field(ge=1, le=32)]


class WideDeep(Strict):
    """Wide & Deep (Cheng et al. 2016): first-order terms + MLP."""

    type: Literal["wide_deep"] = "wide_deep"
    hidden_units: Units
    activation: Activations = "relu"


class DeepFM(Strict):
    """DeepFM (Guo et al. 2017): first-order terms + factorization machine + MLP on the same embeddings."""

    type: Literal["deepfm"] = "deepfm"
    hidden_units: Units
    activation: Activations = "relu"


class XDeepFM(Strict):
    """xDeepFM (Lian et al. 2018): first-order terms + compressed interaction network + MLP. See `interactions.cin`."""

    type: Literal["xdeepfm"] = "xdeepfm"
    cin_units: SomeUnits
    cin_activation: Plain | LeakyReLU = "identity"
    cin_halves: bool = False
    hidden_units: Units
    activation: Activations = "relu"

    @model_validator(mode="after")
    def _halves(self) -> Self:
        if self.cin_halves and any(u % 2 for u in self.cin_units[:-1]):
            raise ValueError(f"cin_units: got {list(self.cin_units)}, expected even ones but for the last, as they are halved")
        return self


class DCN(Strict):
    """Deep & Cross Network (Wang et al. 2017): rank-one cross layers beside an MLP, or alone if it has no units.

    With `first_order` the first-order terms are added to the logit.
    """

    type: Literal["dcn"] = "dcn"
    cross_layers: Layers
    hidden_units: Units
    activation: Activations = "relu"
    first_order: bool = False


class DCNv2(Strict):
    """DCN-V2 (Wang et al. 2021): cross layers before the MLP (stacked), beside one (parallel), both, or alone.

    Cross layers are full matrices, products of two of rank `rank`, or with `experts` a gated mixture of such; with `outer_bias`
    x_0 * (W x) + b + x. With `first_order` the first-order terms are added to the logit.
    """

    type: Literal["dcnv2"] = "dcnv2"
    structure: Literal["stacked", "parallel", "stacked_parallel", "crossnet_only"] = "parallel"
    cross_layers: Layers
    rank: Count | None = None
    experts: Count | None = None
    hidden_units: Units = ()
    parallel_hidden_units: Units = ()
    activation: Activations = "relu"
    first_order: bool = False
    outer_bias: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.experts is not None and self.rank is None:
            raise ValueError("rank: got none, expected one for a mixture of experts")
        if bool(self.hidden_units) == (self.structure == "crossnet_only"):
            raise ValueError(f"hidden_units: got {list(self.hidden_units)}, expected some unless structure is crossnet_only")
        if bool(self.parallel_hidden_units) != (self.structure == "stacked_parallel"):
            got = list(self.parallel_hidden_units)
            raise ValueError(f"parallel_hidden_units: got {got}, expected some if, and only if, structure is stacked_parallel")
        return self


class TargetAttention(Strict):
    """One attention unit of DIN: the features `targets` side by side are the query, `sequences` (pooling "none") the keys."""

    targets: Annotated[tuple[Name, ...], Field(min_length=1)]
    sequences: Annotated[tuple[Name, ...], Field(min_length=1)]
    hidden_units: SomeUnits
    activation: Activation = "dice"
    output_activation: Plain = "identity"
    softmax: bool = False
    masked: bool = True

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.targets) != len(self.sequences):
            raise ValueError(f"sequences: got {len(self.sequences)}, expected one for each of the {len(self.targets)} targets")
        return self


class DIN(Strict):
    """Deep Interest Network (Zhou et al. 2018): behaviour sequences pooled by target attention, then an MLP on all."""

    type: Literal["din"] = "din"
    attention: Annotated[tuple[TargetAttention, ...], Field(min_length=1)]
    hidden_units: Units
    activation: Activations = "relu"


class DLRM(Strict):
    """DLRM (Naumov et al. 2019): an MLP on the numbers, dots of it and all embeddings pairwise, an MLP on both."""

    type: Literal["dlrm"] = "dlrm"
    bottom_units: SomeUnits
    hidden_units: Units
    activation: Activation = "relu"
    self_interaction: bool = False


class DLRMDCNv2(Strict):
    """DLRM with DCN-V2 cross layers in the place of the dots, of low rank unless `rank` is none (MLPerf's DLRM-DCNv2)."""

    type: Literal["dlrm_dcnv2"] = "dlrm_dcnv2"
    bottom_units: SomeUnits
    cross_layers: Layers
    rank: Count | None = None
    hidden_units: Units
    activation: Activation = "relu"


class GraphFile(Strict):
    """A model without a function of its own here: its op graph lies in the bundle's graph.json (`bundle.graph_file`)."""

    type: Literal["graph"] = "graph"


Architecture = Annotated[
    WideDeep | DeepFM | XDeepFM | DCN | DCNv2 | DIN | DLRM | DLRMDCNv2 | GraphFile, Field(discriminator="type")
]
