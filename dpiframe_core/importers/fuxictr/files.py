"""The files of a FuxiCTR training run: found, read, and checked to belong together. Knows no layers and no values.

A run is a checkpoint, `feature_map.json`, `feature_vocab.json`, its parameters as YAML, and the pickled feature processor, the
only place where FuxiCTR keeps its numeric normalisers (a YAML file of them does instead).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow.compute as pc
from pydantic import Field, TypeAdapter, ValidationError

from dpiframe_core.errors import InputError, listed, shown
from dpiframe_core.features.transforms import MinMax, Standardize
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.importers.fuxictr.pickled_processor import FeatureMapRecord, Processor, read_processor
from dpiframe_core.importers.fuxictr.processor import as_mapping, check_tokenizers, processor_normalizers
from dpiframe_core.importers.token_ids import read_token_ids
from dpiframe_core.strict import first_fault, told
from dpiframe_core.strict_yaml import load_yaml

Normalizer = Annotated[Standardize | MinMax, Field(discriminator="type")]
_NORMALIZERS: TypeAdapter[dict[str, Standardize | MinMax]] = TypeAdapter(dict[str, Normalizer])
_LACKS = {
    "config.yaml": "a file of the run's parameters, which FuxiCTR keeps nowhere: docs/import-fuxictr.md has a line that does",
    "feature_map.json": "a file of FuxiCTR's data directory, data_root/dataset_id",
    "feature_vocab.json": "a file of FuxiCTR's data directory, data_root/dataset_id",
}
_CHECKPOINTS = ("*.model", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class FuxiFiles:
    """Paths of a run's files; `None`: not there."""

    checkpoint: Path
    feature_map: Path
    vocab: Path
    config: Path
    processor: Path | None
    normalizers: Path | None


@dataclass(frozen=True, slots=True)
class FuxiRun:
    """What the files say.

    Attributes:
        config: the run's parameters. features: name -> FuxiCTR's specification, in its order, "meta" ones left out.
        columns: name -> the data set's column (dtype, fill_na, splitter ..). vocabularies: name -> the ids of its tokens.
        normalizers: of the numeric features that have one.
        labels: names of the label columns.
    """

    files: FuxiFiles
    config: Mapping[str, Any]
    features: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, Mapping[str, Any]]
    vocabularies: Mapping[str, VocabularyTable]
    normalizers: Mapping[str, Standardize | MinMax]
    labels: tuple[str, ...]


def find_files(
    run: Path,
    feature_map: Path | None = None,
    vocab: Path | None = None,
    config: Path | None = None,
    processor: Path | None = None,
    normalizers: Path | None = None,
) -> FuxiFiles:
    """A run's files: those named, the others beside its checkpoint. `run`: a directory, or the checkpoint itself.

    Raises:
        InputError: one is not there, or there are several checkpoints.
    """
    checkpoint = run
    if run.is_dir():
        found = sorted(p for pattern in _CHECKPOINTS for p in run.glob(pattern))
        if len(found) != 1:
            got = [p.name for p in found] or "no checkpoint"
            raise InputError(str(run), got, f"one ({', '.join(_CHECKPOINTS)}), with the run's files beside it; or name it")
        checkpoint = found[0]
    beside = checkpoint.parent

    def needed(given: Path | None, name: str, option: str) -> Path:
        path = given or beside / name
        if not path.is_file():
            raise InputError(f"--{option}", str(path), _LACKS.get(name, "a file"))
        return path

    if processor is None and normalizers is None and (beside / "feature_processor.pkl").is_file():
        processor = beside / "feature_processor.pkl"
    if not checkpoint.is_file():
        raise InputError("checkpoint", str(checkpoint), "a file, or a directory with one")
    return FuxiFiles(
        checkpoint,
        needed(feature_map, "feature_map.json", "feature-map"),
        needed(vocab, "feature_vocab.json", "vocab"),
        needed(config, "config.yaml", "config"),
        None if processor is None else needed(processor, "", "processor"),
        None if normalizers is None else needed(normalizers, "", "normalizers"),
    )


def read_run(files: FuxiFiles) -> FuxiRun:
    """Reads all but the checkpoint.

    Raises:
        InputError: a file is damaged, or two of them are of different runs; with the names of what disagrees.
    """
    config = as_mapping(str(files.config), _yaml(files.config))
    feature_map = as_mapping(str(files.feature_map), _json(files.feature_map))
    processor = None if files.processor is None else read_processor(files.processor)
    for where, owner in _data_sets(files, feature_map, processor).items():
        if config.get("dataset_id") is not None and owner != config["dataset_id"]:
            raise InputError(f"{where}: dataset_id", owner, f"{config['dataset_id']!r} as in {files.config}")
    features = _features(files, feature_map, config)
    columns = _columns(files, config, processor)
    unknown = [name for name in features if name not in columns]
    if unknown:
        source = files.config if processor is None else files.processor
        raise InputError(
            str(files.feature_map), f"{len(unknown)} unknown features", f"columns of {source}, not {listed(unknown)}"
        )
    vocabularies = _vocabularies(files, features)
    if processor is not None:
        check_tokenizers(processor, str(files.processor), files.vocab.name, vocabularies)
    if files.normalizers is not None:
        try:
            normalizers = dict(_NORMALIZERS.validate_python(_yaml(files.normalizers)))
        except ValidationError as e:
            raise InputError(str(files.normalizers), first_fault(e), "feature: {type: standardize, mean: .., std: ..}, or "
                             "{type: minmax, minimum: .., maximum: ..}") from None  # fmt: skip
        for name in normalizers:
            if name not in features:
                raise InputError(f"{files.normalizers}: {name}", "a normaliser", f"one of a feature: {shown(list(features))}")
    else:
        normalizers = {} if processor is None else processor_normalizers(processor, str(files.processor))
    labels = _names(f"{files.feature_map}: labels", feature_map.get("labels") or [])
    return FuxiRun(files, config, features, columns, vocabularies, normalizers, tuple(labels))


def _features(files: FuxiFiles, feature_map: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """As FuxiCTR's FeatureMap.load: the map's features, then `use_features`, then `feature_specs` over them."""
    listed = feature_map.get("features")
    if not isinstance(listed, list) or not all(isinstance(f, dict) for f in listed):
        raise InputError(f"{files.feature_map}: features", listed, "a list of features, as FuxiCTR 2.3 writes it")
    features = {str(name): dict(as_mapping(f"{files.feature_map}: {name}", spec)) for f in listed for name, spec in f.items()}
    used = _names(f"{files.config}: use_features", config.get("use_features") or list(features))
    for name in used:
        if name not in features:
            raise InputError(f"{files.config}: use_features", name, f"a feature of {files.feature_map}")
    where, specs = f"{files.config}: feature_specs", config.get("feature_specs") or []
    if not isinstance(specs, list):
        raise InputError(where, specs, "a list of mappings with names")
    for spec in specs:
        given = as_mapping(where, spec).get("name")
        for name in _names(f"{where}: name", given if isinstance(given, list) else [given]):
            if name not in features:
                raise InputError(where, name, f"a feature of {files.feature_map}")
            features[name] |= {k: v for k, v in spec.items() if k != "name"}
    return {name: features[name] for name in used if features[name].get("type") != "meta"}


def _columns(files: FuxiFiles, config: Mapping[str, Any], processor: Processor | None) -> dict[str, dict[str, Any]]:
    """One specification for each column: the processor's, which made the data, or the configuration's."""
    listed = config.get("feature_cols") if processor is None else processor.fields.get("feature_cols")
    if not isinstance(listed, list) or not listed:
        raise InputError(
            f"{files.config}: feature_cols", listed, "the columns of the data set; or a --processor, which has them"
        )
    columns: dict[str, dict[str, Any]] = {}
    for column in listed:
        names = column.get("name") if isinstance(column, dict) else None
        for name in names if isinstance(names, list) else [names]:
            if not isinstance(name, str):
                raise InputError(f"{files.config}: feature_cols", column, "columns with names")
            columns[name] = dict(column) | {"name": name}
    return columns


def _vocabularies(files: FuxiFiles, features: Mapping[str, Mapping[str, Any]]) -> dict[str, VocabularyTable]:
    needed = [name for name, spec in features.items() if spec.get("type") in ("categorical", "sequence")]
    found: Mapping[str, Any] | None = read_token_ids(files.vocab, needed)
    if found is None or any(tokens.id_of("__OOV__") is None for tokens in found.values()):
        found = as_mapping(str(files.vocab), _json(files.vocab))  # whole, for the checks to say what is wrong
    missing = [name for name in needed if name not in found]
    if missing:
        raise InputError(str(files.vocab), f"{len(missing)} vocabularies missing", f"one for each of {listed(missing)}")
    wrong = []
    for name in needed:
        size = _size(f"{files.vocab}: {name}", found[name])
        if size != features[name].get("vocab_size"):
            wrong.append(f"{name} ({size} ids, vocab_size {features[name].get('vocab_size')})")
    if wrong:
        got = f"{len(wrong)} other sizes than {files.feature_map.name}"
        raise InputError(str(files.vocab), got, f"the same for {listed(wrong)}")
    return {name: v if isinstance(v := found[name], VocabularyTable) else VocabularyTable.of(v) for name in needed}


def _size(where: str, vocabulary: object) -> int:
    if isinstance(vocabulary, VocabularyTable):
        return int(pc.max(vocabulary.table["id"]).as_py()) + 1
    tokens = as_mapping(where, vocabulary)
    if not tokens or not all(type(i) is int and i >= 0 for i in tokens.values()) or "__OOV__" not in tokens:
        raise InputError(where, shown(tokens), "ids from 0 on, __OOV__ among them")
    return int(max(tokens.values())) + 1


def _data_sets(files: FuxiFiles, feature_map: Mapping[str, Any], processor: Processor | None) -> dict[str, Any]:
    out = {str(files.feature_map): feature_map.get("dataset_id")}
    record = None if processor is None else processor.fields.get("feature_map")
    if isinstance(record, FeatureMapRecord):
        out[str(files.processor)] = record.fields.get("dataset_id")
    return out


def _names(where: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(where, value, "a list of names")
    return value


def _yaml(path: Path) -> object:
    try:
        return load_yaml(path.read_bytes())
    except ValueError as e:
        raise told(e, str(path)) from None


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise InputError(str(path), str(e), "JSON") from None
