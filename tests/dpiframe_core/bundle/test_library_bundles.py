"""The newer models as bundles: written, read, warmed up on the golden rows of an oracle, described, scored from raw values."""

import numpy as np
import pytest
import torch

from dpiframe_core.bundle.bundle import Golden, Provenance, read_bundle, write_bundle
from dpiframe_core.describe.inspect import describe
from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import BundleError, InputError
from tests import model_oracle, oracle
from tests.backends import BACKENDS
from tests.dpiframe_core.models.test_library_models import CASES, random_model

NAMES = ["xdeepfm-halves", "din", "din-two-fields", "dlrm", "dlrm-dcnv2", "dcnv2-mixture"]


def bundle_of(path, name, dense_of=lambda dense: dense):
    architecture, options = CASES[name]
    schema, dense, tensors, tables, rng = random_model(architecture, **options)
    block = oracle.make_block(schema, 24, 5, rng)
    scores = model_oracle.scores(schema, architecture, dense, tables, block).astype(np.float32)
    write_bundle(
        path, name="library", version="1", architecture=architecture, feature_schema=schema,
        dense={k: torch.from_numpy(v) for k, v in dense_of(dense).items()}, tables=tensors, vocabularies={},
        golden=Golden(block, scores), provenance=Provenance(source="test"),
    )  # fmt: skip
    return path, schema, architecture, dense, tables


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_warms_up_on_its_golden_rows(name, device, tmp_path):
    path, *_ = bundle_of(tmp_path / "b", name)
    engine = Engine.load(path, device=device, precision="fp32")
    engine.warmup()
    engine.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_is_described_with_its_own_operators(name, tmp_path):
    text = describe(read_bundle(bundle_of(tmp_path / "b", name)[0]))
    op = {"xdeepfm-halves": "cin", "dlrm": "dot", "dlrm-dcnv2": "cross_low_rank", "dcnv2-mixture": "mixture"}
    assert op.get(name, "attention") in text
    if name == "dlrm-dcnv2":
        assert "joined as it is written" in text
        assert "concat" not in text
    if name.startswith("din"):
        assert "up to" in text
        assert "side by side" in text.partition("Graph")[0]


def test_histories_come_as_lists_of_any_length(tmp_path):
    path, schema, architecture, dense, tables = bundle_of(tmp_path / "b", "din")
    engine = Engine.load(path, device="cpu")
    engine.warmup()
    candidates = {f.name: [1, 2, 3] for f in schema.features if f.name.startswith("c") and f.scope == "candidate"}
    numbers = {f.name: [0.5, -1.0, 2.0] for f in schema.features if f.name.startswith("p")}
    for history in ([], [1], [4, 3, 2, 1, 0, 1, 2]):
        got = engine.score(candidates | numbers, {"c1": 7, "s0": history})
        block = engine.encoder.encode(candidates | numbers, {"c1": 7, "s0": history})
        want = model_oracle.scores(schema, architecture, dense, tables, block)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=r"context.s0: got 8, expected at most 7 values"):
        engine.score(candidates | numbers, {"c1": 7, "s0": [1] * 8})
    engine.close()


def test_a_parameter_of_another_shape_is_refused_by_name(tmp_path):
    def cut(dense):
        return dense | {"attention.0.0.weight": dense["attention.0.0.weight"][:, :-1]}

    path, *_ = bundle_of(tmp_path / "b", "din", cut)
    message = r"attention.0.0.weight: got \(16, 31\), expected \(16, 32\)"
    with pytest.raises(BundleError, match=message):
        Engine.load(path, device="cpu")
