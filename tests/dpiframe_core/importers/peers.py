"""What the tests against the real libraries share: their import, random weights, the samples.

A library is imported with warnings off: its own deprecations are not ours to fail on.
"""

import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SHARED = Path(__file__).resolve().parents[4] / "shared"
SAMPLES = SHARED / "data"
RUNS = SHARED / "fuxictr_runs"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the click-log samples are not beside this checkout")
needs_runs = pytest.mark.skipif(not RUNS.is_dir(), reason="the FuxiCTR runs are not beside this checkout")


def library(name: str) -> ModuleType:
    """Skips the calling module, with the reason, if the library is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} is not installed (the extra test-peers): {error}", allow_module_level=True)


class Later:
    """A module of a library, imported when a test asks for something of it, and not by each process that collects: these take
    a second or two each."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, of: str) -> Any:
        if of.startswith("_"):  # pytest, which looks for tests
            raise AttributeError(of)
        return getattr(library(self._name), of)


def randomized(model: torch.nn.Module, seed: int = 1, embeddings: float = 0.1) -> torch.nn.Module:
    """Weights and batch-norm statistics of a size that moves the score; padding rows stay zero. In evaluation mode.

    `embeddings`: their deviation. They are small, as trained ones are: numbers many deviations from their mean would make
    scores ill-conditioned, which the libraries' own float32 does not survive either.
    """
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            padding = module.padding_idx if isinstance(module, torch.nn.Embedding) else None
            for name, p in module.named_parameters(recurse=False):
                if p.dtype == torch.bool:
                    continue
                scale = 0.3 if p.dim() < 2 else 1 / p.shape[-1] ** 0.5
                if isinstance(module, torch.nn.Embedding) or p.shape[-1] == 1:
                    scale = embeddings
                p.copy_(torch.randn(p.shape, generator=made) * scale)
                if padding is not None and name == "weight":
                    p[padding] = 0
            for name, b in module.named_buffers(recurse=False):
                if name == "running_mean":
                    b.copy_(torch.randn(b.shape, generator=made) * 0.2)
                if name == "running_var":
                    b.copy_(torch.rand(b.shape, generator=made) + 0.5)
    return model.eval()
