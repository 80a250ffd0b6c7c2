"""`dpiframe compress` as a function: bundle in, bundle out, and figures that the new bundle keeps when it is served."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from deployments.cli.tables.compress_command import CompressJob, write_compressed
from deployments.cli.tables.compression import Compression
from dpiframe_core.bundle.bundle import Bundle, read_bundle, write_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import GOLDEN_TOLERANCE, EngineOptions
from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import DeepFM, GraphFile
from dpiframe_core.models.model_graph import model_graph
from tests import oracle
from tests.backends import BACKENDS
from tests.runner import small_bundle

ARCHITECTURE = DeepFM(hidden_units=(16, 8))
OPTIONS = EngineOptions(max_batch_rows=64)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    made: Bundle = small_bundle(tmp_path_factory.mktemp("bundles") / "small", ARCHITECTURE, dim=10, bags=2)
    return made


def quantized(bundle: Path, dtype: str, out: Path, only: Sequence[str] = ()) -> Compression:
    return write_compressed(CompressJob(bundle, out, dtype, only=tuple(only)))  # type: ignore[arg-type]


def held(bundle: Bundle) -> dict[str, np.ndarray]:
    """The values that a bundle's tables stand for, in float64."""
    scales = {name: scale.double().numpy() for name, scale in bundle.scales.items()}
    return {name: weight.double().numpy() * scales.get(name, 1.0) for name, weight in bundle.tables.items()}


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16"])
def test_served_scores_are_those_of_the_stored_values_and_as_far_off_as_reported(
    bundle: Bundle, tmp_path: Path, dtype: str, device: str
) -> None:
    done = quantized(bundle.path, dtype, tmp_path / "out")
    got = read_bundle(tmp_path / "out")
    engine = Engine(got, device, "fp32", OPTIONS)
    report = engine.warmup()  # which checks the source model's golden scores
    assert report.golden_error == pytest.approx(done.max_deviation, abs=2e-6)
    block = oracle.make_block(got.manifest.feature_schema, 50, 4, np.random.default_rng(3))
    dense = {name: tensor.numpy() for name, tensor in got.dense.items()}
    want = oracle.scores(got.manifest.feature_schema, ARCHITECTURE, dense, held(got), block)
    np.testing.assert_allclose(engine.submit(block), want, rtol=0, atol=1e-5)
    source = oracle.scores(bundle.manifest.feature_schema, ARCHITECTURE, dense, held(bundle), got.golden.block)
    off = np.abs(engine.submit(got.golden.block) - source)
    assert (off.max(), off.mean()) == pytest.approx((done.max_deviation, done.mean_deviation), abs=2e-6)
    assert off.max() > 1e-6
    engine.close()


def test_a_graph_in_the_bundle_goes_along(bundle: Bundle, tmp_path: Path) -> None:
    model = model_graph(bundle)
    m = bundle.manifest
    write_bundle(
        tmp_path / "graph", name="graph", version="1", architecture=GraphFile(), feature_schema=m.feature_schema,
        dense=bundle.dense, tables=bundle.tables, vocabularies={}, golden=bundle.golden, provenance=m.provenance, graph=model,
    )  # fmt: skip
    quantized(tmp_path / "graph", "float16", tmp_path / "out")
    assert read_bundle(tmp_path / "out").graph == model


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_tolerances_let_every_precision_serve(bundle: Bundle, tmp_path: Path, precision: str) -> None:
    quantized(bundle.path, "int8", tmp_path / "out")
    engine = Engine(read_bundle(tmp_path / "out"), "cuda", precision, OPTIONS)
    engine.warmup()
    engine.close()


def test_only_the_tables_change(bundle: Bundle, tmp_path: Path) -> None:
    done = quantized(bundle.path, "int8", tmp_path / "out", ["c2", "bag0"])
    got, source = read_bundle(tmp_path / "out"), bundle.manifest
    schema = got.manifest.feature_schema
    assert [t.name for t in schema.tables if t.dtype == "int8"] == ["c2", "bag0"] == [t.new.name for t in done.tables]
    changed = {name for name, digest in got.manifest.files.items() if source.files[name] != digest}
    assert changed == {"tables/c2.safetensors", "tables/bag0.safetensors"}
    assert got.manifest.files.keys() == source.files.keys()
    assert (got.manifest.name, got.manifest.version) == ("small", "1-int8")
    note = f"dpiframe compress: of version 1 (fingerprint {bundle.fingerprint[:16]}) 2 tables changed; "
    assert note in got.manifest.provenance.notes
    for t in done.tables:
        error = np.abs(held(got)[t.new.name] - held(bundle)[t.new.name]).max()
        assert t.error == pytest.approx(error, rel=1e-4)
        assert error <= 0.50001 * float(got.scales[t.new.name].max())


def test_a_tolerance_is_what_it_was_and_what_the_tables_add_rounded_up(bundle: Bundle, tmp_path: Path) -> None:
    done = quantized(bundle.path, "int8", tmp_path / "out")
    assert got_tolerance(tmp_path / "out") == done.tolerance
    assert done.max_before < 1e-6
    for precision, usual in GOLDEN_TOLERANCE.items():
        needed = usual + done.max_deviation - done.max_before
        assert needed <= done.tolerance[precision] <= 1.1 * needed  # type: ignore[index]


def got_tolerance(path: Path) -> dict[str, float]:
    return {str(k): v for k, v in read_bundle(path).manifest.golden.tolerance.items()}


def test_a_second_conversion_adds_only_its_own_deviation(bundle: Bundle, tmp_path: Path) -> None:
    names = [t.name for t in bundle.manifest.feature_schema.tables]
    first = quantized(bundle.path, "int8", tmp_path / "first", names[::2])
    both = quantized(tmp_path / "first", "float16", tmp_path / "both", names[1::2])
    at_once = quantized(bundle.path, "int8", tmp_path / "all")
    assert both.max_before == first.max_deviation
    assert both.tolerance["fp32"] < at_once.tolerance["fp32"] + 2e-5
    assert both.version == "1-int8-float16"
    assert read_bundle(tmp_path / "both").manifest.provenance.notes.count("dpiframe compress") == 2
    Engine(read_bundle(tmp_path / "both"), "cpu", "fp32", OPTIONS).warmup()


def test_the_report_names_every_table_and_the_deviation(bundle: Bundle, tmp_path: Path) -> None:
    done = quantized(bundle.path, "float16", tmp_path / "out", ["c4", "bag1"])
    lines = done.report().splitlines()
    errors = {t.new.name: f"{t.error:.3g}" for t in done.tables}
    assert lines[:2] == [
        f"c4    1,240 -> 620 bytes, float32 -> float16, off by at most {errors['c4']}",
        f"bag1  520 -> 260 bytes, float32 -> float16, off by at most {errors['bag1']}",
    ]
    used = [sum(t.nbytes for t in b.tables.values()) for b in (bundle, read_bundle(tmp_path / "out"))]
    assert lines[2] == (f"small 1-float16: 2 tables changed; all tables {used[0]:,} -> {used[1]:,} bytes")
    assert lines[3].startswith(f"golden rows, fp32: probabilities off by {done.max_deviation:.3g} at most and ")
    assert lines[4] == (
        f"golden.tolerance: fp32 {done.tolerance['fp32']:.2g}, tf32 {done.tolerance['tf32']:.2g}, "
        f"bf16 {done.tolerance['bf16']:.2g}, fp8 {done.tolerance['fp8']:.2g} (what it was, and what a new dtype adds)"
    )


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(bundle: Bundle, tmp_path: Path) -> None:
    quantized(bundle.path, "int8", tmp_path / "int8", ["c2"])
    quantized(bundle.path, "float16", tmp_path / "float16")
    cases = [
        ((bundle.path, "int8", tmp_path / "int8"), "--out: got '.*int8', expected a path where nothing is yet"),
        ((bundle.path, "int8", tmp_path / "x", ["c2", "no"]), r"--only: got 'no', expected one of \['c0', 'c0_w', 'c1'"),
        ((tmp_path / "int8", "int8", tmp_path / "x"), "tables.c2.dtype: got 'int8', expected float tables; --only names"),
        ((tmp_path / "int8", "float16", tmp_path / "x", ["c2"]), "tables.c2.dtype: got 'int8', expected float tables"),
        ((tmp_path / "float16", "float16", tmp_path / "x"), "--table-dtype: got 'float16', expected a dtype that some table"),
    ]  # fmt: skip
    for arguments, message in cases:
        with pytest.raises(InputError, match=message):
            quantized(*arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_a_value_too_large_for_the_dtype_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    tables = {name: weight.clone() for name, weight in bundle.tables.items()}
    tables["c3"][0, 0] = 1e5
    m = bundle.manifest
    write_bundle(
        tmp_path / "large", name=m.name, version=m.version, architecture=m.architecture, feature_schema=m.feature_schema,
        dense=bundle.dense, tables=tables, vocabularies={}, golden=bundle.golden, provenance=m.provenance,
    )  # fmt: skip
    with pytest.raises(InputError, match="--table-dtype: got 'float16', expected a dtype that holds every value of table c3"):
        quantized(tmp_path / "large", "float16", tmp_path / "x")
    assert not (tmp_path / "x").exists()
