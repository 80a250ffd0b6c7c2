"""RecBole's DIN and DIEN, a state dict and a spec in, against the scores that the library's own classes gave."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.importers.recbole.checkpoint import recbole
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.recbole.history_cases import CASES, TOKENS, rows, spec, vocabulary

STORED = Path(__file__).parent / "stored"


def files(case, folder):
    """The checkpoint, the spec beside its vocabularies, and the library's scores, float32[rows, 1]."""
    weights = load_file(STORED / f"{case.name}.safetensors")
    expected = weights.pop("expected").numpy()
    torch.save(weights, folder / "model.pt")
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec(case)))
    for name in TOKENS:
        (folder / f"{name}.json").write_text(json.dumps(vocabulary(name)))
    return folder / "model.pt", folder / "spec.yaml", expected


def scores(path, columns):
    """Of each row as a request of its own, float32[n, 1]: its history is context."""
    engine = Engine(read_bundle(path), "cpu", "fp32")
    engine.warmup()
    try:
        lists = [name for name in columns if name.endswith("_list")]
        out = []
        for i in range(len(columns["item_id"])):
            context = {name: columns[name][i] for name in lists}
            one = {name: [v[i]] for name, v in columns.items() if name not in lists and name in engine.schema.columns}
            out.append(engine.score(one, context))
        return np.concatenate(out)
    finally:
        engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_raw_tokens_score_as_in_the_library(tmp_path, case):
    checkpoint, spec_file, expected = files(case, tmp_path)
    write_import(recbole(checkpoint, spec_file), tmp_path / "bundle")
    assert expected.std() > 5e-3
    got = scores(tmp_path / "bundle", rows(case))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
