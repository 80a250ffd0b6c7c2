"""Values of features as networks take them: of encoded rows, or random ones to trace on; and what a network makes of rows."""

import numpy as np
import torch
from torch import Tensor

from dpiframe_core.features.examples import sample_columns
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.importers.networks.module import NetModule
from dpiframe_core.importers.networks.net import PADDING
from dpiframe_core.importers.source_model import Inputs

_ROWS = 64


def sample_values(schema: FeatureSchema) -> dict[str, Tensor]:
    """Random rows, to trace a model on."""
    columns = sample_columns(schema, _ROWS)
    return {f.name: _value(columns[f.name], f.is_id, f.max_values) for f in schema.features}


def encoded_values(schema: FeatureSchema, inputs: Inputs) -> dict[str, Tensor]:
    """feature -> int64[n] or [n, longest] ids, padded; float32[n] numbers."""
    return {f.name: _value(inputs.column(f.name), f.is_id, f.max_values) for f in schema.features}


def exact_logits(module: NetModule, schema: FeatureSchema, inputs: Inputs) -> Tensor:
    """float64[n, tasks] of encoded rows."""
    values = encoded_values(schema, inputs)
    ids = [v.flatten().numpy() for v in values.values() if not v.is_floating_point()]
    exact = module.exact(torch.from_numpy(np.unique(np.concatenate([[PADDING], *ids]))))
    found: Tensor = exact({n: v.double() if v.is_floating_point() else v for n, v in values.items()})
    return found


def _value(column: "np.ndarray[tuple[int, int], np.dtype[np.generic]]", is_id: bool, longest: int) -> Tensor:
    if not is_id:
        return torch.from_numpy(column[:, 0].astype(np.float32))
    ids = torch.from_numpy(column.astype(np.int64))
    return torch.where(ids < 0, PADDING, ids) if longest > 1 else ids[:, 0]
