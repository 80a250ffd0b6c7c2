"""Bundles come back as they were written, and every way to spoil one is refused in one line that names the file."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dpiframe_core.bundle.bundle import (
    Bundle,
    Golden,
    GoldenSpec,
    Manifest,
    Precision,
    Provenance,
    VocabularyTable,
    read_bundle,
    write_bundle,
)
from dpiframe_core.bundle.manifest import manifest_yaml, parse_manifest
from dpiframe_core.errors import BundleError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table, Vocabulary
from dpiframe_core.features.transforms import Bucketize, Log
from dpiframe_core.graph.architecture import DCNv2

SCHEMA = FeatureSchema(
    features=(
        Numeric(
            name="age",
            scope="context",
            transforms=(Log(), Bucketize(boundaries=(0.5, 1e-5 + 1), first_id=1)),
            table="age",
            missing_id=0,
        ),
        Categorical(name="C1", encoder=Vocabulary(), table="C1", first_order_table="w", missing_id=0, oov_id=1),
        Categorical(name="item", encoder=Vocabulary(file="items"), values="int", table="item", missing_id=0, oov_id=1),
        Categorical(name="tags", encoder=Hash(buckets=5, first_id=2), table="tags", max_values=2, missing_id=-1),
        Categorical(name="slot", encoder=Identity(), values="int", table="item", missing_id=0),
        Numeric(name="price", missing_value=0.0),
    ),
    tables=(
        Table(name="age", rows=4, dim=2, dtype="int8"),
        Table(name="C1", rows=6, dim=2, dtype="bfloat16"),
        Table(name="w", rows=5, dim=1),
        Table(name="item", rows=10, dim=2, dtype="float16"),
        Table(name="tags", rows=7, dim=2),
    ),
)
VOCABULARIES = {
    "C1": VocabularyTable.of({"b": 3, "a": 2, "ünï": 4, "": 2}),
    "items": VocabularyTable.of({-(2**63): 2, 7: 9}),
}


def parts() -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    block = Encoder(SCHEMA, VOCABULARIES).encode(
        {
            "C1": ["a", None, "?"],
            "item": [7, 8, None],
            "tags": [["x"], None, ["x", "y"]],
            "slot": [0, 9, 5],
            "price": [1, -2.5, 0],
        },
        {"age": 3},
    )
    return {
        "name": "demo",
        "version": "2026-11-20.1",
        "architecture": DCNv2(cross_layers=1, hidden_units=(4, 2)),
        "feature_schema": SCHEMA,
        "dense": {"head.weight": torch.ones(2, 13), "head.bias": torch.tensor([0.5, -0.0])},
        "tables": {t.name: torch.randn(t.rows, t.dim, generator=random).to(getattr(torch, t.dtype)) for t in SCHEMA.tables},
        "scales": {"age": torch.tensor([0.5, 2e-3])},
        "vocabularies": VOCABULARIES,
        "golden": Golden(block, np.array([[0, 1], [0.5, 0.25], [1e-9, 0.75]], np.float32)),
        "tasks": ("click", "buy"),
        "precision": Precision(dense="tf32"),
        "golden_tolerance": {"bf16": 0.02},
        "provenance": Provenance(
            source="tests: seed 1", created="2026-11-20", metrics={"auc": 0.7999}, notes="naïve\n'quoted': #"
        ),
        "example": {"context": {"age": 3}, "candidates": {"C1": ["ünï"]}},
    }


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "demo"
    write_bundle(path, **parts())
    return path


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "demo"))


def contents(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes fields of model.yaml by hand, as a user would, and brings the hashes up to date."""
    fields = yaml.safe_load((bundle / "model.yaml").read_bytes())
    for name in fields["files"]:
        if (bundle / name).is_file():
            fields["files"][name] = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    change(fields)
    (bundle / "model.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))


def refusal(bundle: Path, **options: Any) -> str:
    """The error's one line, after the bundle's path."""
    with pytest.raises(BundleError) as caught:
        read_bundle(bundle, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{bundle}/")
    return line.removeprefix(f"{bundle}/")


# Round trip -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
def test_a_bundle_reads_back_as_written(pristine: Path, verify: bool) -> None:
    given, got = parts(), read_bundle(pristine, verify=verify)
    assert isinstance(got, Bundle)
    for field in ("name", "version", "architecture", "feature_schema", "tasks", "precision", "provenance"):
        assert getattr(got.manifest, field) == given[field]
    assert got.manifest.golden.model_dump() == {"rows": 3, "tolerance": {"bf16": 0.02}}
    for kind in ("dense", "tables", "scales"):
        read = getattr(got, kind)
        assert read.keys() == given[kind].keys()
        for name, tensor in given[kind].items():
            assert read[name].dtype == tensor.dtype
            assert read[name].view(torch.uint8).equal(tensor.view(torch.uint8))
    for name, vocabulary in VOCABULARIES.items():
        assert got.vocabularies[name].values == vocabulary.values
        assert sorted(got.vocabularies[name].table.to_pylist(), key=str) == sorted(vocabulary.table.to_pylist(), key=str)
    np.testing.assert_array_equal(got.golden.scores, given["golden"].scores)
    for section in ("request_of_row", "context_ids", "candidate_ids", "context_dense", "candidate_dense"):
        np.testing.assert_array_equal(getattr(got.golden.block, section), getattr(given["golden"].block, section))
    assert got.example == given["example"]
    assert got.path == pristine


def test_a_readback_encodes_as_the_source_did(pristine: Path) -> None:
    got = read_bundle(pristine)
    block = Encoder(got.manifest.feature_schema, got.vocabularies).encode(
        {"C1": ["ünï", ""], "item": [-(2**63), 7], "tags": [[], []], "slot": [1, 1], "price": [0, 0]}, {"age": None}
    )
    assert block.wide_ids("candidate_ids")[:, :2].tolist() == [[4, 2], [2, 9]]


def test_equal_bundles_have_equal_bytes_whatever_the_order_of_the_mappings(pristine: Path, tmp_path: Path) -> None:
    turned = {k: dict(reversed(v.items())) if k in ("dense", "tables", "vocabularies") else v for k, v in parts().items()}
    turned["vocabularies"]["C1"] = VocabularyTable.of({"": 2, "a": 2, "b": 3, "ünï": 4})
    write_bundle(tmp_path / "other", **turned)
    assert contents(tmp_path / "other") == contents(pristine)


def test_the_manifest_is_fit_for_people(pristine: Path) -> None:
    text = (pristine / "model.yaml").read_text()
    assert list(yaml.safe_load(text)) == [
        "format", "name", "version", "architecture", "tasks", "precision", "provenance", "golden", "schema", "files",
    ]  # fmt: skip
    assert "\n  - {name: C1, rows: 6, dim: 2, dtype: bfloat16}\n" in text
    assert "\n    encoder: {type: hash, algorithm: murmur3_32, buckets: 5, seed: 0, first_id: 2}\n" in text
    assert max(map(len, text.splitlines())) <= 128


@given(
    st.text(st.characters(codec="utf-8")),
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.floats(allow_nan=False, allow_infinity=False)),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5, unique=True),
)
def test_any_text_and_float_survive_the_yaml(notes: str, metrics: dict[str, float], boundaries: list[float]) -> None:
    feature = Numeric(
        name="on", transforms=(Bucketize(boundaries=tuple(sorted(boundaries)), first_id=1),), table="null", missing_id=0
    )
    schema = FeatureSchema(features=(feature,), tables=(Table(name="null", rows=9, dim=1),))
    required = ("dense.safetensors", "golden.safetensors", "tables/null.safetensors")
    manifest = Manifest(
        name="1e5",
        version="1.0",
        architecture=DCNv2(cross_layers=1, hidden_units=(4,)),
        tasks=("yes",),
        provenance=Provenance(source=notes, metrics=metrics, notes=notes),
        golden={"rows": 1},  # type: ignore[arg-type]
        schema=schema,
        files=dict.fromkeys(required, "0" * 64),
    )
    assert parse_manifest(manifest_yaml(manifest)) == manifest


def test_the_fingerprint_follows_every_file(bundle: Path) -> None:
    before = read_bundle(bundle).fingerprint
    assert before == hashlib.sha256((bundle / "model.yaml").read_bytes()).hexdigest()
    (bundle / "example.json").write_text("{}")
    edit(bundle, lambda fields: None)
    assert read_bundle(bundle).fingerprint != before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["item", "age"])
def test_a_table_is_mapped_not_copied(bundle: Path, name: str) -> None:
    file = str(bundle / f"tables/{name}.safetensors")
    tables = read_bundle(bundle).tables
    assert file in Path("/proc/self/maps").read_text()
    tables[name][0] = 7  # a private page: the file stays as it was
    assert not read_bundle(bundle).tables[name][0].eq(7).any()
    del tables
    assert file not in Path("/proc/self/maps").read_text()


def test_a_bundle_may_be_reached_through_a_link(pristine: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(pristine)
    assert read_bundle(tmp_path / "current").manifest.name == "demo"


def test_a_bundle_may_have_no_tables_vocabularies_and_example(tmp_path: Path) -> None:
    schema = FeatureSchema(features=(Numeric(name="x", missing_value=0.0),))
    golden = Golden(Encoder(schema, {}).encode({"x": [1.0]}), np.full((1, 1), 0.5, np.float32))
    lean = parts() | {
        "feature_schema": schema,
        "tables": {},
        "scales": {},
        "vocabularies": {},
        "golden": golden,
        "tasks": ("click",),
        "example": None,
    }
    write_bundle(tmp_path / "lean", **lean)
    assert set(contents(tmp_path / "lean")) == {"model.yaml", "dense.safetensors", "golden.safetensors"}
    assert read_bundle(tmp_path / "lean").example is None


def test_files_follow_the_umask_so_that_another_user_can_serve_them(pristine: Path) -> None:
    usual = pristine.parent / "usual"
    usual.touch()
    assert {p.stat().st_mode for p in pristine.rglob("*") if p.is_file()} == {usual.stat().st_mode}


# Writing --------------------------------------------------------------------------------------------------------------


def spoiled(**changes: Any) -> dict[str, Any]:
    return parts() | changes


NAN_TABLE = torch.full((7, 2), 1.0)
NAN_TABLE[6, 1] = torch.nan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../demo"},
         "model.yaml: name: got '../demo', expected text of the pattern '^[A-Za-z0-9_][A-Za-z0-9_.\\-]{0,127}$'"),
        ({"version": "1 "}, "model.yaml: version: got '1 ', expected text of the pattern '^\\.*[!-\\-0-~][!-.0-~]*$'"),
        ({"version": "1/2"}, "model.yaml: version: got '1/2', expected text of the pattern '^\\.*[!-\\-0-~][!-.0-~]*$'"),
        ({"version": ".."}, "model.yaml: version: got '..', expected text of the pattern '^\\.*[!-\\-0-~][!-.0-~]*$'"),
        ({"version": "1" * 65}, f"model.yaml: version: got '{'1' * 65}', expected at most 64 characters"),
        ({"tasks": ("click", "click")}, "model.yaml: tasks: got ('click', 'click'), expected distinct names"),
        ({"tasks": ("click",)}, "golden.safetensors: scores: got float32[3, 2], expected float32[3, 1]"),
        ({"golden_tolerance": {"bf16": 0.0}}, "model.yaml: GoldenSpec.tolerance.bf16: got 0.0, expected greater than 0"),
        ({"dense": {"w": torch.ones(2, dtype=torch.float64)}},
         "dense.safetensors: w: got torch.float64, expected torch.float32"),
        ({"dense": {"w": torch.tensor([1, torch.inf])}}, "dense.safetensors: w: got inf, expected finite numbers"),
        ({"tables": {"../../x": torch.ones(1)}}, "tables: got '../../x', expected only what the schema names"),
        ({"tables": {}}, "tables: got no 'C1', expected it as the schema names it"),
        ({"vocabularies": VOCABULARIES | {"x": VOCABULARIES["C1"]}}, "vocab: got 'x', expected only what the schema names"),
        ({"vocabularies": VOCABULARIES | {"items": VocabularyTable.of({1: 10})}},
         "vocab/items.parquet: got id 10 for 1, expected ids below 10 for feature item"),
        ({"vocabularies": VOCABULARIES | {"C1": VocabularyTable.of({"a": 5})}},
         "vocab/C1.parquet: got id 5 for 'a', expected ids below 5 for feature C1"),
        ({"tables": parts()["tables"] | {"tags": NAN_TABLE}},
         "tables/tags.safetensors: weight: got nan, expected finite numbers"),
        ({"tables": parts()["tables"] | {"tags": torch.ones(7, 3)}},
         "tables/tags.safetensors: weight: got torch.float32[7, 3], expected torch.float32[7, 2]"),
        ({"tables": parts()["tables"] | {"C1": torch.ones(6, 2)}},
         "tables/C1.safetensors: weight: got torch.float32[6, 2], expected torch.bfloat16[6, 2]"),
        ({"tables": parts()["tables"] | {"age": torch.ones(4, 2)}},
         "tables/age.safetensors: weight: got torch.float32[4, 2], expected torch.int8[4, 2]"),
        ({"scales": {}}, "scales: got no 'age', expected it as the schema names it"),
        ({"scales": parts()["scales"] | {"tags": torch.ones(2)}}, "scales: got 'tags', expected only what the schema names"),
        ({"scales": {"age": torch.ones(2, 1)}},
         "tables/age.safetensors: scale: got torch.float32[2, 1], expected torch.float32[2]"),
        ({"scales": {"age": torch.tensor([1, torch.inf])}},
         "tables/age.safetensors: scale: got inf, expected finite numbers"),
        ({"scales": {"age": torch.tensor([1, 0.0])}},
         "tables/age.safetensors: scale: got 0.0, expected finite numbers above 0"),
        ({"example": {"x": float("nan")}},
         "example.json: got 'Out of range float values are not JSON compliant: nan', expected values that JSON can hold"),
        ({"example": {"x": "\ud800"}}, None),
        ({"example": {"x": object()}},
         "example.json: got 'Object of type object is not JSON serializable', expected values that JSON can hold"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_not_written(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    target = tmp_path / "demo"
    with pytest.raises(BundleError) as caught:
        write_bundle(target, **spoiled(**changes))
    if message is not None:
        assert str(caught.value) == f"{target}/{message}"
    assert os.listdir(tmp_path) == []


def test_an_existing_path_is_kept_unless_it_is_a_bundle_to_overwrite(bundle: Path) -> None:
    before = contents(bundle)
    rule = "expected a new one, or a bundle and overwrite=True"
    with pytest.raises(BundleError) as caught:
        write_bundle(bundle, **parts())
    assert str(caught.value) == f"{bundle}: got an existing path, {rule}"
    with pytest.raises(BundleError, match=r"tags.safetensors: weight: got nan"):
        write_bundle(bundle, **spoiled(tables=parts()["tables"] | {"tags": NAN_TABLE}), overwrite=True)
    with pytest.raises(BundleError, match=r"demo/tables/int8: got a path in the bundle .*demo, expected one outside"):
        write_bundle(bundle / "tables" / "int8", **parts())
    assert contents(bundle) == before
    write_bundle(bundle, **spoiled(version="2"), overwrite=True)
    assert read_bundle(bundle).manifest.version == "2"
    assert os.listdir(bundle.parent) == ["demo"]
    (bundle / "model.yaml").unlink()
    with pytest.raises(BundleError, match=rule):
        write_bundle(bundle, **parts(), overwrite=True)


def test_a_model_yaml_that_is_not_ours_makes_no_folder_a_bundle(tmp_path: Path) -> None:
    """It may be an import's spec, beside the checkpoint: no folder to replace, and none to keep out of."""
    (tmp_path / "model.yaml").write_text("model: DCN\n")
    (tmp_path / "weights.pt").write_bytes(b"all that is left of the training")
    with pytest.raises(BundleError, match=r"got an existing path, expected a new one, or a bundle and overwrite=True"):
        write_bundle(tmp_path, **parts(), overwrite=True)
    write_bundle(tmp_path / "demo", **parts())
    assert sorted(os.listdir(tmp_path)) == ["demo", "model.yaml", "weights.pt"]
    assert read_bundle(tmp_path / "demo").manifest.name == "demo"


def test_dense_parameters_may_share_memory_and_need_not_be_contiguous(tmp_path: Path) -> None:
    one = torch.arange(6.0).reshape(2, 3)
    write_bundle(tmp_path / "demo", **spoiled(dense={"a": one, "b": one.T, "c": one[1], "d": torch.nn.Parameter(one)}))
    dense = read_bundle(tmp_path / "demo").dense
    assert dense["b"].tolist() == one.T.tolist()
    assert dense["c"].tolist() == [3, 4, 5]
    assert not dense["d"].requires_grad


# Reading what was spoiled -----------------------------------------------------------------------------------------------


def test_a_path_without_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as caught:
        read_bundle(tmp_path / "no")
    assert str(caught.value) == f"{tmp_path / 'no'}: got no directory, expected a model bundle"
    assert refusal(tmp_path) == "model.yaml: got no such file, expected one in every bundle"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "model.yaml: got while parsing a flow node expected the node content, but found '<stream end>' "
                    'in "<byte string>", line 1, column 8: name: [ ^, expected plain YAML'),
        ("- 1", "model.yaml: got [1], expected a mapping of keys"),
        ("", "model.yaml: got None, expected a mapping of keys"),
        ("name: a\nname: b", "model.yaml: got the key 'name' twice in \"<byte string>\", "
                             "line 2, column 1: name: b ^, expected plain YAML"),
        ("a: &x [1]\nb: *x",
         "model.yaml: got the alias *x in \"<byte string>\", line 2, column 4: b: *x ^, expected plain YAML"),
        ("a: !!python/name:os.system", None),
        ("[a]: 1", "model.yaml: got a key that is no text in \"<byte string>\", "
                   "line 1, column 1: [a]: 1 ^, expected plain YAML"),
        ("2026-01-01: 1", None),
        ("\x00", None),
        ("a: " + "[" * 5000, "model.yaml: got values nested too deeply, expected YAML of a few levels"),
        ("name: demo", "model.yaml: format: got None, expected 'dpiframe-bundle/1'"),
        ("format: dpiframe-bundle/2\nnew: 1", "model.yaml: format: got 'dpiframe-bundle/2', expected 'dpiframe-bundle/1'"),
        ("format: dpiframe-bundle/1\nx: .nan", None),
        ("x: !!int ''", None),
        ("x: 0x" + "f" * 9999, None),
        ("format: dpiframe-bundle/1\nx: 2026-13-45", None),
    ],
)  # fmt: skip
def test_a_broken_manifest_is_refused(bundle: Path, text: str, message: str | None) -> None:
    (bundle / "model.yaml").write_text(text)
    got = refusal(bundle)
    assert got.startswith("model.yaml: ")
    if message is not None:
        assert got == message


def test_a_manifest_reads_the_same_where_pyyaml_has_no_libyaml(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = parse_manifest(text := (bundle / "model.yaml").read_bytes())
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert parse_manifest(text) == read


@given(st.binary(max_size=200) | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")), st.integers(0, 4000))
def test_no_manifest_raises_anything_but_a_bundle_error(pristine: Path, garbage: bytes, at: int) -> None:
    whole = (pristine / "model.yaml").read_bytes()
    with contextlib.suppress(BundleError):
        parse_manifest(whole[:at] + garbage + whole[at:])
    with pytest.raises(BundleError):
        parse_manifest(garbage)


FEATURE_1 = "schema.features.1.categorical"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(color="red"), "color: got 'red', expected no such key"),
        (lambda m: m["precision"].update(fp8=True), "precision.fp8: got True, expected no such key"),
        (lambda m: m.pop("provenance"), "provenance: got nothing, expected a value"),
        (lambda m: m.update(version=1.0), "version: got 1.0, expected a valid string"),
        (lambda m: m["golden"].update(rows="3"), "golden.rows: got '3', expected a valid integer"),
        (lambda m: m["golden"].update(rows=0), "golden.rows: got 0, expected greater than or equal to 1"),
        (lambda m: m["golden"]["tolerance"].update(fp4=1),
         "golden.tolerance.fp4.[key]: got 'fp4', expected 'fp32', 'tf32', 'bf16' or 'fp8'"),
        (lambda m: m["provenance"]["metrics"].update(auc=float("nan")),
         "provenance.metrics.auc: got nan, expected a finite number"),
        (lambda m: m["schema"]["features"][1].update(oov_id=True), f"{FEATURE_1}.oov_id: got True, expected a valid integer"),
        (lambda m: m["schema"]["features"][1].update(oov_id=5),
         "schema: features.C1.first_order_table: got 5 rows, expected more than oov_id, 5"),
        (lambda m: m["schema"]["tables"].pop(),
         "schema: features.tags.table: got 'tags', expected one of the tables ['C1', 'age', 'item', 'w']"),
        (lambda m: m["files"].update({"../x": "0" * 64}), "files: got '../x', expected only files that the schema needs"),
        (lambda m: m["files"].update({"tables/x.safetensors": "0" * 64}),
         "files: got 'tables/x.safetensors', expected only files that the schema needs"),
        (lambda m: m["files"].pop("vocab/items.parquet"),
         "files: got no vocab/items.parquet, expected every file that the schema needs"),
        (lambda m: (m.pop("name"), m.pop("version")), "name: got nothing, expected a value (1 more fault)"),
    ],
)  # fmt: skip
def test_a_manifest_with_a_wrong_value_is_refused_by_its_key(
    bundle: Path, change: Callable[[Any], object], message: str
) -> None:
    edit(bundle, change)
    assert refusal(bundle) == f"model.yaml: {message}"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["dense.safetensors", "tables/C1.safetensors", "vocab/C1.parquet", "example.json"])
def test_a_missing_file_is_named(bundle: Path, name: str, verify: bool) -> None:
    (bundle / name).unlink()
    assert refusal(bundle, verify=verify) == f"{name}: got no such file, expected it as model.yaml lists it"


@pytest.mark.parametrize("name", ["weights.pkl", "tables/old.safetensors", ".hidden/x"])
def test_an_unlisted_file_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).touch()
    assert refusal(bundle, verify=False) == f"{name}: got a file that model.yaml does not list, expected none"


@pytest.mark.parametrize("name", ["dense.safetensors", "model.yaml", "tables", "extra"])
def test_links_inside_a_bundle_are_refused(bundle: Path, name: str) -> None:
    outside = bundle.parent / "outside"
    if (bundle / name).exists():
        (bundle / name).rename(outside)
    (bundle / name).symlink_to(outside)
    assert refusal(bundle) == f"{name}: got a link or a special file, expected a regular one"


def test_a_pipe_is_not_waited_for(bundle: Path) -> None:
    (bundle / "dense.safetensors").unlink()
    os.mkfifo(bundle / "dense.safetensors")
    assert refusal(bundle) == "dense.safetensors: got a link or a special file, expected a regular one"


@pytest.mark.bulk
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_any_flipped_byte_is_noticed_and_without_hashes_does_no_other_harm(pristine: Path, data: st.DataObject) -> None:
    names = sorted(contents(pristine).keys() - {"model.yaml"})
    file = pristine / data.draw(st.sampled_from(names))
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1) | st.integers(0, min(200, len(whole) - 1)))
    try:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :])
        relative = file.relative_to(pristine)
        got = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        want = hashlib.sha256(whole).hexdigest()[:16]
        assert refusal(pristine) == f"{relative}: got sha256 {got}..., expected {want}... as model.yaml says"
        try:
            read_bundle(pristine, verify=False)
        except BundleError as error:
            assert "\n" not in str(error)  # noqa: PT017 (some bytes may change without harm to the structure)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
@pytest.mark.parametrize("name", ["dense.safetensors", "golden.safetensors", "tables/tags.safetensors"])
def test_a_truncated_tensor_file_is_refused_without_its_hash(bundle: Path, name: str, keep: int) -> None:
    whole = (bundle / name).read_bytes()
    (bundle / name).write_bytes(whole[:keep])
    line = refusal(bundle, verify=False)
    assert line.startswith(f"{name}: got ")
    assert line.endswith(", expected a whole safetensors file")


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(bundle: Path) -> None:
        loaded = {key: tensor.clone() for key, tensor in load_file(bundle / name).items()}
        change(loaded)
        save_file(loaded, bundle / name)

    return spoil


def golden(key: str, row: int, column: int, value: float) -> Callable[[Path], None]:
    return tensors("golden.safetensors", lambda t: t[key].view(t[key].shape[0], -1).__setitem__((row, column), value))


def vocabulary(value: Any, ident: Any, names: tuple[str, str] = ("value", "id")) -> Callable[[Path], None]:
    return lambda bundle: pq.write_table(pa.table([value, ident], names=names), bundle / "vocab/C1.parquet")


SIX = "['candidate_dense', 'candidate_ids', 'context_dense', 'context_ids', 'request_of_row', 'scores']"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (tensors("dense.safetensors", lambda t: t.update(w=torch.ones(1, dtype=torch.float16))),
         "dense.safetensors: w: got torch.float16, expected torch.float32"),
        (tensors("dense.safetensors", lambda t: t.update(w=torch.tensor(torch.nan))),
         "dense.safetensors: w: got nan, expected finite numbers"),
        (tensors("tables/tags.safetensors", lambda t: t.update(bias=torch.ones(1))),
         "tables/tags.safetensors: got tensors ['bias', 'weight'], expected ['weight']"),
        (tensors("tables/tags.safetensors", lambda t: t.update(weight=t["weight"].T.contiguous())),
         "tables/tags.safetensors: weight: got torch.float32[2, 7], expected torch.float32[7, 2]"),
        (tensors("tables/tags.safetensors", lambda t: t.update(weight=t["weight"].half())),
         "tables/tags.safetensors: weight: got torch.float16[7, 2], expected torch.float32[7, 2]"),
        (tensors("tables/age.safetensors", lambda t: t.pop("scale")),
         "tables/age.safetensors: got tensors ['weight'], expected ['scale', 'weight']"),
        (tensors("tables/age.safetensors", lambda t: t.update(scale=t["scale"].double())),
         "tables/age.safetensors: scale: got torch.float64[2], expected torch.float32[2]"),
        (tensors("tables/age.safetensors", lambda t: t.update(scale=t["scale"][:1].clone())),
         "tables/age.safetensors: scale: got torch.float32[1], expected torch.float32[2]"),
        (tensors("tables/age.safetensors", lambda t: t["scale"].neg_()),
         "tables/age.safetensors: scale: got -0.5, expected finite numbers above 0"),
        (tensors("tables/age.safetensors", lambda t: t["scale"].mul_(torch.inf)),
         "tables/age.safetensors: scale: got inf, expected finite numbers above 0"),
        (tensors("golden.safetensors", lambda t: t.pop("scores")),
         f"golden.safetensors: got tensors {SIX.replace(chr(44) + ' ' + repr('scores'), '')}, expected {SIX}"),
        (tensors("golden.safetensors", lambda t: t.update(candidate_ids=t["candidate_ids"].long())),
         "golden.safetensors: candidate_ids: got int64[3, 5], expected int32[3, 5]"),
        (tensors("golden.safetensors", lambda t: t.update(context_dense=torch.ones(2, 0))),
         "golden.safetensors: context_dense: got float32[2, 0], expected float32[1, 0]"),
        (tensors("golden.safetensors", lambda t: t.update(request_of_row=t["request_of_row"][:2].clone())),
         "golden.safetensors: request_of_row: got int32[2], expected int32[3]"),
        (golden("request_of_row", 1, 0, 1), "golden.safetensors: request_of_row: got 1, expected 0 to 0"),
        (golden("scores", 2, 1, 1.5), "golden.safetensors: scores: got 1.5, expected 0 to 1"),
        (golden("scores", 0, 0, torch.nan), "golden.safetensors: scores: got nan, expected 0 to 1"),
        (golden("candidate_dense", 2, 0, torch.inf),
         "golden.safetensors: candidate_dense: got inf, expected -3.40282347e+38 to 3.40282347e+38"),
        (golden("context_ids", 0, 0, 4), "golden.safetensors: context_ids: feature age: got 4, expected 0 to 3"),
        (golden("candidate_ids", 1, 0, 5), "golden.safetensors: candidate_ids: feature C1: got 5, expected 0 to 4"),
        (golden("candidate_ids", 1, 1, -1), "golden.safetensors: candidate_ids: feature item: got -1, expected 0 to 9"),
        (golden("candidate_ids", 1, 3, -2), "golden.safetensors: candidate_ids: feature tags: got -2, expected -1 to 6"),
        (vocabulary(["a"], [2], ("id", "value")),
         "vocab/C1.parquet: vocabulary: got columns ['id', 'value'], expected ['value', 'id']"),
        (vocabulary([1.5], [2]), "vocab/C1.parquet: vocabulary: got value of type double, expected string or int64"),
        (vocabulary(["a"], ["2"]), "vocab/C1.parquet: vocabulary: got id of type string, expected int64"),
        (vocabulary(["a", None], [2, 3]), "vocab/C1.parquet: vocabulary: got 1 nulls, expected none"),
        (vocabulary(["a", "b", "c", "b"], [2, 3, 4, 4]),
         "vocab/C1.parquet: vocabulary: got 'b' twice, expected distinct values"),
        (vocabulary(["a"], [-1]), "vocab/C1.parquet: vocabulary: got id -1, expected ids from 0"),
        (vocabulary(["a", "b"], [2, 5]), "vocab/C1.parquet: got id 5 for 'b', expected ids below 5 for feature C1"),
        (vocabulary([1], [2]), "vocab/C1.parquet: got int values, expected string for feature C1"),
        (lambda b: (b / "vocab/C1.parquet").write_bytes(b"PAR1"), None),
        (lambda b: (b / "example.json").write_text("[1]"), "example.json: got [1], expected a JSON object"),
        (lambda b: (b / "example.json").write_bytes(b"\xff"), None),
        (lambda b: (b / "example.json").write_text("[" * 100_000), None),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_though_its_hash_is_right(
    bundle: Path, spoil: Callable[[Path], object], message: str | None
) -> None:
    spoil(bundle)
    edit(bundle, lambda fields: None)
    got = refusal(bundle)
    if message is not None:
        assert got == message


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": 2, 7: 3}, "got a value of type int, expected str"),
        ({7: 3, True: 3}, "got a value of type bool, expected int"),
        ({"a": 2.0}, "got a id of type float, expected int"),
        ({"a": -1}, "got id -1, expected ids from 0"),
    ],
)
def test_a_vocabulary_of_mixed_values_is_refused(entries: Any, message: str) -> None:
    with pytest.raises(BundleError) as caught:
        VocabularyTable.of(entries)
    assert str(caught.value) == f"vocabulary: {message}"


@pytest.mark.parametrize("entries", [{"\ud800": 2}, {2**63: 2}, {"a": 2**63}])
def test_a_vocabulary_beyond_utf8_or_64_bits_is_refused(entries: Any) -> None:
    with pytest.raises(BundleError, match=r"^vocabulary: got .*, expected UTF-8 text or integers of 64 bits$"):
        VocabularyTable.of(entries)


def test_example_json_keeps_text_readable(pristine: Path) -> None:
    text = (pristine / "example.json").read_text()
    assert "ünï" in text
    assert json.loads(text) == parts()["example"]


def _unsaid(text: bytes) -> bytes:
    """A `model.yaml` without what a schema says since it takes nothing for granted, where it says what once was taken."""
    fields = yaml.safe_load(text)
    former = {"missing_id": 0, "missing_value": 0.0, "oov_id": 1}
    for feature in fields["schema"]["features"]:
        for key in [key for key, value in former.items() if feature.get(key, ()) == value]:
            del feature[key]
        for part in [*feature.get("transforms", ()), feature.get("encoder", {})]:
            part.pop("first_id", None)
    return yaml.safe_dump(fields, sort_keys=False).encode()


def test_what_a_schema_does_not_say_is_written_as_null_and_read_so(caplog: pytest.LogCaptureFixture) -> None:
    features = (
        Categorical(name="user", values="int", encoder=Identity(), table="t"),
        Categorical(name="word", encoder=Hash(buckets=5), table="t"),
        Categorical(name="item", encoder=Vocabulary(), table="t"),
        Numeric(name="price"),
        Numeric(name="hour", transforms=(Bucketize(boundaries=(1.0, 2.0, 3.0, 4.0)),), table="t"),
    )
    schema = FeatureSchema(features=features, tables=(Table(name="t", rows=5, dim=2),))
    hashes = dict.fromkeys(("dense.safetensors", "golden.safetensors", "tables/t.safetensors", "vocab/item.parquet"), "0" * 64)
    manifest = Manifest(
        name="m", version="1", architecture=DCNv2(hidden_units=(2,), cross_layers=1), provenance=Provenance(source="test"),
        golden=GoldenSpec(rows=1), schema=schema, files=hashes,
    )  # fmt: skip
    text = manifest_yaml(manifest)
    assert text.count(b"null") == 8
    with caplog.at_level("WARNING"):
        assert parse_manifest(text) == manifest
    assert not caplog.records


def test_a_bundle_from_before_is_read_with_a_warning_that_names_the_features_and_scores_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = parts()
    write_bundle(tmp_path / "b", **given)
    told = (tmp_path / "b" / "model.yaml").read_bytes()
    (tmp_path / "b" / "model.yaml").write_bytes(_unsaid(told))
    with caplog.at_level("WARNING"):
        read = read_bundle(tmp_path / "b")
    assert [r.getMessage() for r in caplog.records] == [
        "model.yaml of demo: got nothing for missing_id (0) of age, C1, item, slot, first_id (1) of age, oov_id (1) of C1, "
        "item, first_id (2) of tags, missing_value (0.0) of price, expected each, or null; scored as before"
    ]
    schema = read.manifest.feature_schema
    assert schema == SCHEMA
    nulls = {"age": [None], "C1": [None], "item": [None], "tags": [None], "slot": [None], "price": [None]}
    block = Encoder(schema, read.vocabularies).encode(nulls)
    assert block.wide_ids("candidate_ids").tolist() == [[0, 0, -1, -1, 0]]
    assert block.wide_ids("context_ids").tolist() == [[0]]
    assert block.candidate_dense.tolist() == [[0.0]]
    unknown = Encoder(schema, read.vocabularies).encode(nulls | {"C1": ["?"], "item": [8]})
    assert unknown.wide_ids("candidate_ids").tolist() == [[1, 1, -1, -1, 0]]
