"""Runs of FuxiCTR's zoo, imported by name alone, against the scores that the library's own classes gave (see `make`)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.importers.fuxictr.files import find_files
from dpiframe_core.importers.fuxictr.run import fuxictr
from dpiframe_core.importers.raw_rows import read_rows
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.fuxictr.zoo.cases import CASES, write_run

STORED = Path(__file__).parent / "stored"


def stored_run(case, folder):
    """The run's directory, and the library's scores, float32[rows, tasks]."""
    weights = load_file(STORED / f"{case.name}.safetensors")
    expected = weights.pop("expected").numpy()
    write_run(case, folder)
    torch.save(weights, folder / f"{case.name}.model")
    return folder, expected


def engine_scores(path, device="cpu", precision="fp32"):
    """Of the rows of the run beside the bundle, raw rows in."""
    engine = Engine(read_bundle(path), device, precision)
    engine.warmup()
    try:
        raw, _ = read_rows(path.parent / "run" / "test.csv", engine.schema, None)
        return engine.score(raw)
    finally:
        engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_run_by_its_name_alone_scores_raw_rows_as_the_library_did(tmp_path, case):
    run, expected = stored_run(case, tmp_path / "run")
    written = write_import(fuxictr(find_files(run)), tmp_path / "bundle")
    assert expected.std(0).min() > 1e-3
    assert written.manifest.tasks == (("click",) if len(case.labels) == 1 else case.labels)
    np.testing.assert_allclose(engine_scores(tmp_path / "bundle"), expected, rtol=0, atol=1e-5)
