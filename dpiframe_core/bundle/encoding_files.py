"""What it takes of a bundle to encode requests for its model: manifest, vocabularies, example. No torch: an ingress that leaves
the weights to an engine process reads no more than this.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dpiframe_core.bundle.manifest import (
    EXAMPLE_FILE,
    FORMAT,
    MANIFEST_FILE,
    Manifest,
    parse_manifest,
    vocabulary_file,
    vocabulary_names,
)
from dpiframe_core.errors import BundleError, shown
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.features.vocabulary import VocabularyTable, check_vocabularies, is_vocabulary, read_vocabulary

_HASHING_THREADS = 8  # one SHA-256 stream runs at 1 to 2 GB/s, slower than the disks that hold large tables


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """Filled by `read_encoding`; the attributes are those of `Bundle`."""

    manifest: Manifest
    vocabularies: dict[str, VocabularyTable]
    example: dict[str, Any] | None
    fingerprint: str


def read_encoding(path: str | os.PathLike[str]) -> Encoding:
    """Reads and checks what encoding needs of a bundle; its tensors are not looked at.

    Raises:
        BundleError: missing, damaged or inconsistent; one line, which file and why.
    """
    root = Path(path)
    with named(root):
        try:
            text = (root / MANIFEST_FILE).read_bytes()
        except FileNotFoundError:
            raise BundleError(f"{MANIFEST_FILE}: got no such file, expected one in every bundle") from None
        manifest = parse_manifest(text)
        files = [*map(vocabulary_file, vocabulary_names(manifest.feature_schema)), EXAMPLE_FILE]
        check_hashes(root, {file: manifest.files[file] for file in files if file in manifest.files})
        return Encoding(
            manifest,
            read_vocabularies(root, manifest.feature_schema),
            read_example(root) if EXAMPLE_FILE in manifest.files else None,
            hashlib.sha256(text).hexdigest(),
        )


def read_vocabularies(root: Path, schema: FeatureSchema, keep: bool = True) -> dict[str, VocabularyTable]:
    """Those that the features read, checked against the schema. Without `keep` none, and a row group at a time is in memory."""
    kept: dict[str, VocabularyTable] = {}

    def check(name: str, entries: VocabularyTable) -> None:
        check_vocabularies(schema, {name: entries}, [name])

    for name in vocabulary_names(schema):
        file = vocabulary_file(name)
        if keep or not is_vocabulary(root / file, partial(check, name)):  # the whole says what is wrong
            entries = _read_vocabulary(root, file)
            check(name, entries)
            kept |= {name: entries} if keep else {}
            del entries
    return kept


def read_example(root: Path) -> dict[str, Any]:
    try:
        example = json.loads((root / EXAMPLE_FILE).read_bytes())
    except (ValueError, RecursionError) as e:
        raise BundleError(f"{EXAMPLE_FILE}: got {shown(str(e))}, expected JSON") from None
    if not isinstance(example, dict):
        raise BundleError(f"{EXAMPLE_FILE}: got {shown(example)}, expected a JSON object")
    return example


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hashes(root: Path, hashes: Mapping[str, str]) -> None:
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        found = pool.map(sha256, (root / name for name in hashes))
        for (name, expected), got in zip(hashes.items(), found, strict=True):
            if got != expected:
                raise BundleError(f"{name}: got sha256 {got[:16]}..., expected {expected[:16]}... as model.yaml says")


@contextmanager
def named(root: Path) -> Iterator[None]:
    """Puts the bundle's path before the file names that errors begin with."""
    try:
        yield
    except BundleError as e:
        raise BundleError(f"{root}/{e}") from e.__cause__
    except OSError as e:
        raise BundleError(f"{root}: got {shown(str(e))}, expected files that can be read and written") from e


def listed_files(root: Path) -> set[str]:
    """Every file below `root`, with "/" between the parts. Links are refused: they could lead out of the bundle."""
    found = set()
    for folder, subfolders, names in os.walk(root):
        for name in (*subfolders, *names):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise BundleError(f"{relative}: got a link or a special file, expected a regular one")
            if path.is_file():
                found.add(relative)
    return found


def check_listed(root: Path, names: Iterable[str]) -> None:
    """Raises BundleError unless these files, and the manifest that lists them, are what lies below `root`."""
    found = listed_files(root)
    for file in sorted({*names} ^ found - {MANIFEST_FILE}):
        if file in found:
            raise BundleError(f"{file}: got a file that {MANIFEST_FILE} does not list, expected none")
        raise BundleError(f"{file}: got no such file, expected it as {MANIFEST_FILE} lists it")


def bundle_around(path: Path) -> Path | None:
    """The bundle in whose directory a path lies, None if in none. Anything else in there and it does not load any more."""
    within = path.absolute().parent.resolve()
    return next((folder for folder in (within, *within.parents) if is_bundle(folder)), None)


def is_bundle(folder: Path) -> bool:
    """By its `model.yaml`, which says that it is ours: another one of that name may be anybody's, an import's spec too."""
    file = folder / MANIFEST_FILE
    return file.is_file() and os.access(file, os.R_OK) and FORMAT.encode() in file.read_bytes()


def _read_vocabulary(root: Path, file: str) -> VocabularyTable:
    try:
        return read_vocabulary(root / file)
    except BundleError as e:
        raise BundleError(f"{file}: {e}") from e.__cause__
