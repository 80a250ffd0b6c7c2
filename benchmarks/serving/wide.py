"""A model of the demo's features with dense layers so wide that the GPU, and not the way in, sets a service's rate."""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.serving.peers.eager_http import eager_model
from deployments.demo.export import dense_parameters
from deployments.demo.train import DeepFM, EncodedRows
from dpiframe_core.bundle.bundle import Bundle, Golden, Provenance, read_bundle, write_bundle
from dpiframe_core.graph.architecture import DeepFM as DeepFMArchitecture


def widened(bundle: Bundle, hidden_units: Sequence[int], path: Path, seed: int) -> Bundle:
    """A bundle at `path` with the tables of a DeepFM `bundle` and random dense layers of other widths, as large as He's."""
    widths, schema, generator = tuple(hidden_units), bundle.manifest.feature_schema, torch.Generator().manual_seed(seed)
    model = DeepFM(schema, widths)
    state = eager_model(bundle).state_dict()
    for name, parameter in model.state_dict().items():
        if name not in dense_parameters(model):
            parameter.copy_(state[name])
        elif name.endswith("weight"):
            gain = 1.0 if name.startswith("head") else 2.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (gain / parameter.shape[-1]) ** 0.5)
        else:
            parameter.zero_()
    block = bundle.golden.block
    write_bundle(
        path, name="wide", version="1", architecture=DeepFMArchitecture(hidden_units=widths), feature_schema=schema,
        dense=dense_parameters(model), tables=bundle.tables, vocabularies=bundle.vocabularies,
        golden=Golden(block=block, scores=model.predict(EncodedRows.of(block, schema))),
        provenance=Provenance(source=f"benchmarks: {bundle.manifest.name} with random dense layers, seed {seed}"),
        example=bundle.example,
    )  # fmt: skip
    return read_bundle(path)
