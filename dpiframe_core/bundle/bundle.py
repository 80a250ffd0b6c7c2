"""Model bundles: reads, verifies and writes the directory of one trained model. No pickle; nothing in it is ever executed.

Everything is checked here but what needs the model's graph (parameter shapes) or a device (the golden scores): the engine's.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpiframe_core.bundle.bundle_files import check_finite, move_into_place, new_folder, read_tensors, write_tensors
from dpiframe_core.bundle.encoding_files import (
    bundle_around,
    check_hashes,
    check_listed,
    is_bundle,
    listed_files,
    named,
    read_example,
    read_vocabularies,
    sha256,
)
from dpiframe_core.bundle.golden import Golden, golden_from_tensors
from dpiframe_core.bundle.graph_file import graph_json, read_graph
from dpiframe_core.bundle.manifest import (
    DENSE_FILE,
    EXAMPLE_FILE,
    GOLDEN_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    DensePrecision,
    GoldenSpec,
    Manifest,
    Precision,
    Provenance,
    manifest_yaml,
    parse_manifest,
    vocabulary_file,
    vocabulary_names,
)
from dpiframe_core.bundle.table_files import read_table, write_table
from dpiframe_core.errors import BundleError, InputError, shown
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.features.vocabulary import VocabularyTable, write_vocabulary
from dpiframe_core.graph.architecture import Architecture
from dpiframe_core.graph.graph import Graph

__all__ = [
    "Bundle",
    "Golden",
    "GoldenSpec",
    "Manifest",
    "Precision",
    "Provenance",
    "VocabularyTable",
    "read_bundle",
    "write_bundle",
]


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A bundle as read. Filled by `read_bundle`.

    Attributes:
        path: its directory. manifest: its `model.yaml`.
        dense: parameter name -> float32 tensor. tables: table name -> [rows, dim], memory-mapped: pages are read when touched.
        vocabularies: by vocabulary file name, as `Encoder` takes them.
        golden: rows with known scores. example: one raw request body, for people.
        fingerprint: SHA-256 of `model.yaml`, which holds the hash of every other file: the key of caches.
        scales: table name -> float32[dim], of the int8 tables: value = weight * scale.
        graph: what `graph.json` holds, if the architecture is `graph`.
    """

    path: Path
    manifest: Manifest
    dense: dict[str, torch.Tensor]
    tables: dict[str, torch.Tensor]
    vocabularies: dict[str, VocabularyTable]
    golden: Golden
    example: dict[str, Any] | None
    fingerprint: str
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    graph: Graph | None = None

    @property
    def table_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.tables.values(), *self.scales.values()))


def read_bundle(path: str | os.PathLike[str], *, verify: bool = True, keep_vocabularies: bool = True) -> Bundle:
    """Reads and checks a bundle; `verify=False` skips the hashes (of files known to be whole) and nothing else.

    Without `keep_vocabularies` they are checked, one at a time, and none stays in memory: for who encodes nothing.

    Raises:
        BundleError: missing, damaged or inconsistent; one line, which file and why.
    """
    root = Path(path)
    if not root.is_dir():
        raise BundleError(f"{root}: got no directory, expected a model bundle")
    with named(root):
        return _read(root, verify, keep_vocabularies)


def write_bundle(
    path: str | os.PathLike[str],
    *,
    name: str,
    version: str,
    architecture: Architecture,
    feature_schema: FeatureSchema,
    dense: Mapping[str, torch.Tensor],
    tables: Mapping[str, torch.Tensor],
    vocabularies: Mapping[str, VocabularyTable],
    golden: Golden,
    provenance: Provenance,
    scales: Mapping[str, torch.Tensor] | None = None,
    tasks: tuple[str, ...] = ("click",),
    precision: Precision | None = None,
    golden_tolerance: Mapping[DensePrecision, float] | None = None,
    example: Mapping[str, Any] | None = None,
    graph: Graph | None = None,
    overwrite: bool = False,
    wrote: Callable[[str, int], None] = lambda table, nbytes: None,
) -> Manifest:
    """Writes a bundle beside its target, reads it back with the checks of `read_bundle`, and renames it into place.

    Equal arguments give equal bytes. With `overwrite`, an older bundle at `path` stays until the new one is whole. `wrote`
    is told each table that is written, and its bytes.

    Raises:
        BundleError: `path` is taken or cannot be written, or what was given would not make a readable bundle.
    """
    root = Path(path).absolute()
    if is_taken(root, overwrite):
        raise BundleError(f"{root}: got an existing path, expected a new one, or a bundle and overwrite=True")
    if around := bundle_around(root):
        raise BundleError(f"{root}: got a path in the bundle {around}, expected one outside: it loads with its own files alone")
    with new_folder(root) as staging:
        with named(root):
            _check_given("tables", tables, [table.name for table in feature_schema.tables])
            scales = scales or {}
            _check_given("scales", scales, [table.name for table in feature_schema.tables if table.dtype == "int8"])
            _check_given("vocab", vocabularies, vocabulary_names(feature_schema))
            write_tensors(staging, DENSE_FILE, dense)
            for table, weight in tables.items():
                write_table(staging, table, weight, scales.get(table))
                wrote(table, weight.nbytes)
                del weight  # before the next one is made, of a mapping that makes them
            for vocabulary, entries in vocabularies.items():
                write_vocabulary(entries, staging / vocabulary_file(vocabulary))
            write_tensors(staging, GOLDEN_FILE, golden.tensors())
            if graph is not None:
                (staging / GRAPH_FILE).write_bytes(graph_json(graph))
            if example is not None:
                (staging / EXAMPLE_FILE).write_bytes(_example_json(example))
            try:
                manifest = Manifest(
                    name=name, version=version, architecture=architecture, tasks=tasks, schema=feature_schema,
                    precision=precision or Precision(), provenance=provenance,
                    golden=GoldenSpec(rows=golden.block.rows, tolerance=dict(golden_tolerance or {})),
                    files={file: sha256(staging / file) for file in sorted(listed_files(staging))},
                )  # fmt: skip
            except InputError as e:
                raise BundleError(f"{MANIFEST_FILE}: {e.at(e.where.removeprefix('Manifest.'))}") from None
            (staging / MANIFEST_FILE).write_bytes(manifest_yaml(manifest))
            _read(staging, verify=False, keep_vocabularies=False)
        move_into_place(staging, root)
    return manifest


def is_taken(path: Path, overwrite: bool) -> bool:
    """Whether no bundle may be written there: something else lies there, or a bundle that is not to be overwritten."""
    return os.path.lexists(path) and not (overwrite and not path.is_symlink() and is_bundle(path))


def _read(root: Path, verify: bool, keep_vocabularies: bool) -> Bundle:
    if not (root / MANIFEST_FILE).is_file():
        raise BundleError(f"{MANIFEST_FILE}: got no such file, expected one in every bundle")
    text = (root / MANIFEST_FILE).read_bytes()
    manifest = parse_manifest(text)
    schema = manifest.feature_schema
    check_listed(root, manifest.files)
    if verify:
        check_hashes(root, manifest.files)
    dense = read_tensors(root, DENSE_FILE)
    for key, tensor in dense.items():
        if tensor.dtype != torch.float32:
            raise BundleError(f"{DENSE_FILE}: {key}: got {tensor.dtype}, expected torch.float32")
        check_finite(DENSE_FILE, key, tensor)
    vocabularies = read_vocabularies(root, schema, keep_vocabularies)
    tables = {table.name: read_table(root, table) for table in schema.tables}
    return Bundle(
        path=root, manifest=manifest, dense=dense, vocabularies=vocabularies,
        tables={name: weight for name, (weight, _) in tables.items()},
        golden=golden_from_tensors(read_tensors(root, GOLDEN_FILE), schema, manifest.golden.rows, len(manifest.tasks)),
        example=read_example(root) if EXAMPLE_FILE in manifest.files else None,
        fingerprint=hashlib.sha256(text).hexdigest(),
        scales={name: scale for name, (_, scale) in tables.items() if scale is not None},
        graph=read_graph(root / GRAPH_FILE, schema, len(manifest.tasks)) if GRAPH_FILE in manifest.files else None,
    )  # fmt: skip


def _example_json(example: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(example, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as e:
        raise BundleError(f"{EXAMPLE_FILE}: got {shown(str(e))}, expected values that JSON can hold") from None


def _check_given(folder: str, given: Mapping[str, object], expected: list[str]) -> None:
    """Before names become paths: exactly the names of the schema, which are safe."""
    for name in sorted(given.keys() ^ set(expected)):
        if name in given:
            raise BundleError(f"{folder}: got {shown(name)}, expected only what the schema names")
        raise BundleError(f"{folder}: got no {shown(name)}, expected it as the schema names it")
