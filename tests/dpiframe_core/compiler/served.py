"""Scores of raw example rows through a written bundle: read back, loaded into an engine, encoded, scored."""

import copy
from contextlib import contextmanager

import numpy as np
import torch

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from tests.dpiframe_core.compiler.modules import PADDING, called


@contextmanager
def served(path, device="cpu", precision="fp32", policy="auto"):
    """Gives values' scores, float32[rows, tasks]; the warm-up has checked the golden rows."""
    engine = Engine(read_bundle(path), device, precision, EngineOptions(max_batch_rows=64, policy=policy, recall=False))
    try:
        engine.warmup()
        yield lambda values: torch.from_numpy(np.array(engine.score({name: column(name, v) for name, v in values.items()})))
    finally:
        engine.close()


def served_scores(path, values, device="cpu", *precision, **policy):
    with served(path, device, *precision, **policy) as scores:
        return scores(values)


def exact(module, values):
    """The module's own scores in float64."""
    values = {name: v.double() if v.is_floating_point() else v for name, v in values.items()}
    return called(copy.deepcopy(module).eval().double(), values, {})


def any_rows_score_as(module, path, values, device, policy):
    """Of the bundle: its first row alone, some, and all."""
    with served(path, device, policy=policy) as scores:
        for rows in (slice(0, 1), slice(3, 10), slice(None)):
            part = {feature: v[rows] for feature, v in values.items()}
            torch.testing.assert_close(scores(part).double(), exact(module, part), rtol=0, atol=1e-5)


def column(name, values):
    """A feature's values as a request holds them: of several ones lists, every other one without the absent values."""
    if values.ndim == 1:
        return values.tolist()
    return [[v for v in row if i % 2 or v != PADDING[name]] for i, row in enumerate(values.tolist())]
