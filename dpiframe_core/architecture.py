"""Hyper-parameters of each model that a bundle may hold. Pure data; `models` turns them into op graphs."""

from typing import Annotated, Literal

from pydantic import Field

from dpiframe_core.schema import Strict

Activation = Literal["relu", "sigmoid", "tanh", "identity"]
Units = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]


class WideDeep(Strict):
    """Wide & Deep (Cheng et al. 2016): first-order terms + MLP."""

    type: Literal["wide_deep"] = "wide_deep"
    hidden_units: Units
    activation: Activation = "relu"


class DeepFM(Strict):
    """DeepFM (Guo et al. 2017): first-order terms + factorization machine + MLP on the same embeddings."""

    type: Literal["deepfm"] = "deepfm"
    hidden_units: Units
    activation: Activation = "relu"


class DCN(Strict):
    """Deep & Cross Network (Wang et al. 2017): rank-one cross layers beside an MLP."""

    type: Literal["dcn"] = "dcn"
    cross_layers: Annotated[int, Field(ge=1, le=32)]
    hidden_units: Units
    activation: Activation = "relu"


class DCNv2(Strict):
    """DCN-V2 (Wang et al. 2021): full-matrix cross layers, before the MLP (stacked) or beside it (parallel)."""

    type: Literal["dcnv2"] = "dcnv2"
    structure: Literal["stacked", "parallel"] = "parallel"
    cross_layers: Annotated[int, Field(ge=1, le=32)]
    hidden_units: Units
    activation: Activation = "relu"


class GraphFile(Strict):
    """A model without a function of its own here: its op graph lies in the bundle's graph.json (`graphfile`)."""

    type: Literal["graph"] = "graph"


Architecture = Annotated[WideDeep | DeepFM | DCN | DCNv2 | GraphFile, Field(discriminator="type")]
