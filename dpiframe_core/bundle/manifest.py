"""The manifest of a model bundle, `model.yaml`: what the model is, and which files with which hashes belong to it.

Pure data and its YAML form. Reads no other file.
"""

import json
import logging
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from dpiframe_core.bundle.former_defaults import fill_former_defaults, said
from dpiframe_core.errors import BundleError, listed, shown
from dpiframe_core.features.schema import Categorical, FeatureSchema
from dpiframe_core.features.vocabulary import vocabulary_name
from dpiframe_core.graph.architecture import Architecture
from dpiframe_core.strict import Name, Strict, Version, first_fault
from dpiframe_core.strict_yaml import load_yaml

log = logging.getLogger(__name__)

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # four times as fast, where PyYAML has libyaml

FORMAT: Literal["dpiframe-bundle/1"] = "dpiframe-bundle/1"
MANIFEST_FILE, DENSE_FILE, GOLDEN_FILE, EXAMPLE_FILE = "model.yaml", "dense.safetensors", "golden.safetensors", "example.json"
GRAPH_FILE = "graph.json"

DensePrecision = Literal["fp32", "tf32", "bf16", "fp8"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Provenance(Strict):
    """Where the weights come from: the program or data, a date (ISO 8601), the metrics reached."""

    source: str
    created: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    notes: str = ""


class Precision(Strict):
    """What the model asks to be served with, unless the deployment says otherwise; `dense` None: the device's default.

    A table's own precision is its `dtype` in the schema.
    """

    dense: DensePrecision | None = None


class GoldenSpec(Strict):
    """How many golden rows there are, and tolerances on the probability where the defaults do not fit the model."""

    rows: Annotated[int, Field(ge=1)]
    tolerance: dict[DensePrecision, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)


class Manifest(Strict):
    """All of `model.yaml`. `files` holds the SHA-256 of every other file by its path in the bundle."""

    format: Literal["dpiframe-bundle/1"] = FORMAT
    name: Name
    version: Version
    architecture: Architecture
    tasks: Annotated[tuple[Name, ...], Field(min_length=1)] = ("click",)
    precision: Precision = Precision()
    provenance: Provenance
    golden: GoldenSpec
    feature_schema: FeatureSchema = Field(alias="schema")
    files: dict[str, Sha256]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks: got {shown(self.tasks)}, expected distinct names")
        required = set(bundle_files(self.feature_schema)) | ({GRAPH_FILE} if self.architecture.type == "graph" else set())
        for name in sorted(required - self.files.keys()):
            raise ValueError(f"files: got no {name}, expected every file that the schema needs")
        for name in sorted(self.files.keys() - required - {EXAMPLE_FILE}):
            raise ValueError(f"files: got {shown(name)}, expected only files that the schema needs")
        return self


def bundle_files(schema: FeatureSchema) -> Iterator[str]:
    """The files that a bundle of this schema must hold beside its manifest."""
    yield DENSE_FILE
    yield GOLDEN_FILE
    yield from (table_file(table.name) for table in schema.tables)
    yield from (vocabulary_file(name) for name in vocabulary_names(schema))


def table_file(name: str) -> str:
    return f"tables/{name}.safetensors"


def vocabulary_file(name: str) -> str:
    return f"vocab/{name}.parquet"


def vocabulary_names(schema: FeatureSchema) -> list[str]:
    """The vocabulary files that the features read, each once, in the order of the features."""
    names = (vocabulary_name(f) for f in schema.features if isinstance(f, Categorical))
    return list(dict.fromkeys(name for name in names if name is not None))


def parse_manifest(data: bytes) -> Manifest:
    """Parses the bytes of a `model.yaml`.

    Raises:
        BundleError: the first fault, in one line.
    """
    try:
        fields = load_yaml(data)
        # JSON, so that strict reading ("8" is no int, true no number) still takes lists for tuples.
        former = fill_former_defaults(fields)
        text = json.dumps(fields, default=str)
    except ValueError as e:
        raise BundleError(f"{MANIFEST_FILE}: {e}") from None
    if not isinstance(fields, dict):
        raise BundleError(f"{MANIFEST_FILE}: got {shown(fields)}, expected a mapping of keys")
    if fields.get("format") != FORMAT:  # told first: another format's other keys are no faults
        raise BundleError(f"{MANIFEST_FILE}: format: got {shown(fields.get('format'))}, expected {FORMAT!r}")
    try:
        manifest = Manifest.model_validate_json(text, strict=True)
    except ValidationError as e:
        raise BundleError(f"{MANIFEST_FILE}: {first_fault(e, yaml=True)}") from None
    if former:
        log.warning("%s of %s: got nothing for %s, expected each, or null; scored as before",
                    MANIFEST_FILE, manifest.name, listed(former))  # fmt: skip
    return manifest


def manifest_yaml(manifest: Manifest) -> bytes:
    """The bytes of `model.yaml`: keys in the order of the model, small mappings on one line, hashes one a line."""
    fields: dict[str, Any] = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    for feature in fields["schema"]["features"]:
        for owner, key, _ in said(feature):
            owner.setdefault(key, None)
    text = ""
    for key, value in fields.items():
        in_one_line = isinstance(value, dict | list) and key != "files"
        style = None if in_one_line else False  # PyYAML: None writes the innermost mappings in one line
        # ASCII, since PyYAML writes some line separators of Unicode in a way that it reads back as spaces.
        text += yaml.dump({key: value}, Dumper=_DUMPER, sort_keys=False, width=128, default_flow_style=style)
    return text.encode()
