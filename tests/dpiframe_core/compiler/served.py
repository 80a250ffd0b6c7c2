"""Scores of raw example rows through a written bundle: read back, loaded into an engine, encoded, scored."""

import numpy as np
import torch

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from tests.dpiframe_core.compiler.modules import PADDING


def served_scores(path, values, device="cpu", precision="fp32", policy="auto"):
    """float32[rows, tasks]; the warm-up has checked the golden rows."""
    options = EngineOptions(max_batch_rows=64, policy=policy, recall=False)
    engine = Engine(read_bundle(path), device, precision, options)
    try:
        engine.warmup()
        return torch.from_numpy(np.array(engine.score({name: column(name, v) for name, v in values.items()})))
    finally:
        engine.close()


def column(name, values):
    """A feature's values as a request holds them: of several ones lists, every other one without the absent values."""
    if values.ndim == 1:
        return values.tolist()
    return [[v for v in row if i % 2 or v != PADDING[name]] for i, row in enumerate(values.tolist())]
