"""Versions of a bundle for the tests of the lifecycle: the logit of each score is moved by a number that the test knows."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dpiframe_core.bundle.bundle import Bundle, read_bundle, write_bundle
from dpiframe_core.features.row_block import Floats


def moved(scores: Floats, by: float) -> Floats:
    """Probabilities whose logits are `by` larger."""
    p = scores.astype(np.float64)
    return (1 / (1 + (1 / p - 1) * np.exp(-by))).astype(np.float32)


def write_moved(source: Path, target: Path, version: str, by: float, *, sound: bool = True) -> None:
    """A bundle whose scores are those of `source`, moved. Unless it is `sound`, its golden rows are those of `source`."""
    given = read_bundle(source)
    manifest = given.manifest
    golden = replace(given.golden, scores=moved(given.golden.scores, by)) if sound else given.golden
    write_bundle(
        target,
        name=manifest.name,
        version=version,
        architecture=manifest.architecture,
        feature_schema=manifest.feature_schema,
        dense=_biased(given, by),
        tables=given.tables,
        vocabularies=given.vocabularies,
        golden=golden,
        provenance=manifest.provenance,
        tasks=manifest.tasks,
        example=given.example,
    )


def _biased(given: Bundle, by: float) -> dict[str, object]:
    return given.dense | {"head.bias": given.dense["head.bias"] + by}
