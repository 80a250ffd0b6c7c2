"""Each model is one function from a feature schema and its hyper-parameters to an op graph."""

from typing import assert_never

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import (
    DCN,
    DIN,
    DLRM,
    Architecture,
    DCNv2,
    DeepFM,
    DLRMDCNv2,
    GraphFile,
    WideDeep,
    XDeepFM,
)
from dpiframe_core.graph.graph import Graph
from dpiframe_core.models.dcn import dcn
from dpiframe_core.models.dcnv2 import dcnv2
from dpiframe_core.models.deepfm import deepfm
from dpiframe_core.models.din import din
from dpiframe_core.models.dlrm import dlrm, dlrm_dcnv2
from dpiframe_core.models.wide_deep import wide_deep
from dpiframe_core.models.xdeepfm import xdeepfm


def build_graph(architecture: Architecture, schema: FeatureSchema, tasks: int = 1) -> Graph:
    """The op graph of a model, before fusion.

    Raises:
        ValueError: the schema does not fit the model.
    """
    match architecture:
        case WideDeep():
            return wide_deep(schema, architecture, tasks)
        case DeepFM():
            return deepfm(schema, architecture, tasks)
        case DCN():
            return dcn(schema, architecture, tasks)
        case DCNv2():
            return dcnv2(schema, architecture, tasks)
        case XDeepFM():
            return xdeepfm(schema, architecture, tasks)
        case DIN():
            return din(schema, architecture, tasks)
        case DLRM():
            return dlrm(schema, architecture, tasks)
        case DLRMDCNv2():
            return dlrm_dcnv2(schema, architecture, tasks)
        case GraphFile():
            raise ValueError("got no function of hyper-parameters, expected the graph from the bundle's graph.json")
        case _:
            assert_never(architecture)
