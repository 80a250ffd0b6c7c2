"""What a checkpoint without a feature map does not say, as a small YAML file: its features, and a few hyper-parameters.

Sizes are not written: they are those of the checkpoint's tables. Used by every importer but FuxiCTR's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Discriminator, Field, Tag
from torch import Tensor

from dpiframe_core.errors import BundleError, InputError, shown
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Pooling, Scope, Table, Vocabulary
from dpiframe_core.features.transforms import Log, MinMax, Standardize
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.importers.source_model import SourceLayers, SourceModel, required, tables_in_order
from dpiframe_core.importers.state_dict import StateDict
from dpiframe_core.importers.token_ids import read_token_ids
from dpiframe_core.strict import Name, Strict, told
from dpiframe_core.strict_yaml import load_yaml

T = TypeVar("T")


class SparseFeature(Strict):
    """A category, or with `max_values` > 1 a list of them, that reads `table` (by default one of its own name).

    Raw values are the ids that the model was trained on, or what the JSON file `vocabulary` maps to them. `missing_id` is read
    for null and `oov_id` for unknown values, which are refused without it. A list without `missing_id` has -1: of an empty one
    nothing is read. `pooling`: by default what the library does.
    """

    kind: Literal["sparse"] = "sparse"
    name: Name
    table: Name | None = None
    scope: Scope = "candidate"
    values: Literal["int", "string"] = "int"
    vocabulary: str | None = None
    missing_id: Annotated[int, Field(ge=-1)] | None = None
    oov_id: Annotated[int, Field(ge=0)] | None = None
    max_values: Annotated[int, Field(ge=1, le=1024)] = 1
    pooling: Pooling | None = None
    too_many: Literal["error", "keep_first", "keep_last"] = "error"
    splitter: str | None = None
    padding_value: int | str | None = None


class DenseFeature(Strict):
    """A number, transformed as it was for training; `missing_value` stands for null after that, which is refused without it."""

    kind: Literal["dense"] = "dense"
    name: Name
    scope: Scope = "candidate"
    transforms: tuple[Annotated[Log | Standardize | MinMax, Field(discriminator="type")], ...] = ()
    missing_value: float | None = None


def _kind(feature: object) -> str:
    """Of a feature that says none: sparse, as most are."""
    return str(feature.get("kind", "sparse") if isinstance(feature, dict) else getattr(feature, "kind", "sparse"))


SpecFeature = Annotated[Annotated[SparseFeature, Tag("sparse")] | Annotated[DenseFeature, Tag("dense")], Discriminator(_kind)]


class Spec(Strict):
    """`features` in the order in which the model's constructor got them; `settings`: hyper-parameters by the library's names.

    `wide`, `deep`: the features of the linear and of the deep part, where a model has both and they differ (all by default).
    `tasks`: a name for each score of a model that `--source` makes, which needs no `model`.
    """

    model: str = ""
    features: Annotated[tuple[SpecFeature, ...], Field(min_length=1)]
    wide: tuple[Name, ...] | None = None
    deep: tuple[Name, ...] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    tasks: tuple[Name, ...] | None = None


class Settings:
    """A spec's hyper-parameters, each read once: one that is missing, or that no model reads, is refused by name."""

    def __init__(self, spec: Spec, where: str) -> None:
        self.where = where
        self._left, self._tasks = dict(spec.settings), spec.tasks

    def take(self, key: str, *kinds: type) -> Any:
        """Raises InputError if it is not there or of another type."""
        value = required(self._left, key, f"{self.where}: settings.{key}", kinds)
        del self._left[key]
        return value

    def finish(self, model: str) -> None:
        if self._tasks is not None:
            raise InputError(f"{self.where}: tasks", list(self._tasks), f"none: {model} has one, named click")
        if self._left:
            names = ", ".join(self._left)
            raise InputError(f"{self.where}: settings", names, f"only what {model} does not keep in its checkpoint")


@dataclass(frozen=True, slots=True)
class SpecFile:
    """A spec, where it was read, and its vocabularies by feature."""

    where: str
    spec: Spec
    vocabularies: Mapping[str, VocabularyTable]

    def one_of(self, models: Mapping[str, T]) -> T:
        """What `models` has for the spec's model.

        Raises:
            InputError: nothing.
        """
        if self.spec.model not in models:
            got = self.spec.model or None
            known = f"one of {', '.join(models)}; others by --source FILE.py:NAME, or dpiframe_core.compile"
            raise InputError(f"{self.where}: model", got, known)
        return models[self.spec.model]

    @property
    def settings(self) -> Settings:  # a new one each time: reading uses it up
        return Settings(self.spec, self.where)

    def named(self, names: Sequence[str] | None, key: str) -> list[SparseFeature | DenseFeature]:
        """The features of these names (all, without), in their order.

        Raises:
            InputError: one is no feature of the spec.
        """
        features = {f.name: f for f in self.spec.features}
        for name in names or ():
            if name not in features:
                raise InputError(f"{self.where}: {key}", name, f"one of the features {shown(list(features))}")
        return [features[name] for name in (features if names is None else names)]


def read_spec(path: Path) -> SpecFile:
    """Raises InputError: the file, or a vocabulary that it names, is missing or breaks a rule."""
    try:
        fields = load_yaml(path.read_bytes())
        spec = Spec.model_validate_json(json.dumps(fields, default=str), strict=True)
    except OSError:
        raise InputError("--spec", str(path), "a file") from None
    except ValueError as e:  # also pydantic's
        raise told(e, str(path)) from None
    return with_vocabularies(spec, str(path), path.parent)


def with_vocabularies(spec: Spec, where: str, folder: Path | None = None) -> SpecFile:
    """Reads the JSON files that the spec names, beside it."""
    found = {}
    for f in spec.features:
        if isinstance(f, SparseFeature) and f.vocabulary is not None:
            file = (folder or Path()) / f.vocabulary
            read = read_token_ids(file, None)
            tokens = read and (read[""] if f.values == "string" else read[""].of_integers())
            found[f.name] = tokens or _of_whole(file, f.values, f"{where}: {f.name}.vocabulary")
    return SpecFile(where, spec, found)


def _of_whole(file: Path, values: str, where: str) -> VocabularyTable:
    """By a dict in memory, for what `read_token_ids` leaves."""
    try:
        entries = json.loads(file.read_bytes(), object_pairs_hook=tuple)
        if not isinstance(entries, tuple) or not entries:
            raise ValueError("no entries")
        keys = [key if values == "string" else int(key) for key, _ in entries]
        return VocabularyTable.of_pairs(keys, [ident for _, ident in entries])
    except BundleError as e:
        raise told(e, str(file)) from None
    except OSError:
        raise InputError(where, str(file), "a file, named as seen from the spec's folder") from None
    except (ValueError, RecursionError) as e:
        raise InputError(str(file), str(e), f"a JSON object of {values} values and ids") from None


def build_schema(
    file: SpecFile,
    features: Sequence[SparseFeature | DenseFeature],
    sizes: Mapping[str, tuple[int, int]],
    first_order: Mapping[str, str],
    pooling: Pooling = "mean",
    numbers: Mapping[str, str] | None = None,
    first_order_pooling: Literal["sum", "mean"] | None = None,
) -> FeatureSchema:
    """The schema of the features in the order of the model's input.

    Args:
        sizes: rows and dim of every table. first_order: feature -> its table of linear weights. pooling: of lists by default.
        numbers: number -> its table of one row, which it scales. first_order_pooling: of lists; None: as `pooling`.
    """
    made: list[Categorical | Numeric] = []
    try:
        for f in features:
            first = first_order.get(f.name)
            if isinstance(f, DenseFeature):
                made.append(
                    Numeric(
                        name=f.name, scope=f.scope, transforms=f.transforms, missing_value=f.missing_value,
                        table=(numbers or {}).get(f.name), first_order_table=first,
                    )
                )  # fmt: skip
                continue
            many = f.max_values > 1
            table = f.table or f.name
            unknown = "error" if f.oov_id is None else "oov"
            made.append(
                Categorical(
                    name=f.name, scope=f.scope, values=f.values if f.vocabulary else "int",
                    encoder=Vocabulary() if f.vocabulary else Identity(out_of_range=unknown),
                    table=table, first_order_table=first,
                    missing_id=f.missing_id if f.missing_id is not None or not many else -1,
                    oov_id=f.oov_id, max_values=f.max_values, pooling=f.pooling or pooling if many else "sum",
                    first_order_pooling=first_order_pooling if many and first else None,
                    too_many=f.too_many,
                    splitter=f.splitter, padding_value=f.padding_value,
                )
            )  # fmt: skip
        read = {name for f in made for name in (f.table, f.first_order_table) if name is not None}
        tables = [Table(name=name, rows=rows, dim=dim) for name, (rows, dim) in sizes.items() if name in read]
        return FeatureSchema(features=tuple(made), tables=tuple(tables))
    except InputError as e:
        raise e.at(f"{file.where}: {e.where}") from None


class SpecReader(Protocol):
    """A checkpoint that was read as a spec says. tables: name -> [rows, dim]. first: feature -> its table of linear weights."""

    file: SpecFile
    weights: StateDict
    settings: Settings
    tables: dict[str, Tensor]
    first: dict[str, str]


def spec_model(
    library: str, r: SpecReader, features: Sequence[SpecFeature], layers: SourceLayers, pooling: Pooling = "mean"
) -> SourceModel:
    """The source model of what a reader took, its features in the order of the model's input.

    Raises:
        InputError: parameters or settings are left over, or no schema can express the features.
    """
    name = r.file.spec.model
    r.settings.finish(name)
    r.weights.finish(f"{library}'s {name} with these features")
    sizes = {table: (weight.shape[0], weight.shape[1]) for table, weight in r.tables.items()}
    schema = build_schema(r.file, features, sizes, r.first, pooling)
    return SourceModel(
        library=library, model=name, architecture=layers.architecture, schema=schema, dense=layers.dense,
        tables=tables_in_order(schema, r.tables), vocabularies=r.file.vocabularies, logit=layers.logit,
    )  # fmt: skip
