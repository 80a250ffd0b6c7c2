"""Models of RecBole, DeepCTR-Torch and TorchRec that are not FuxiCTR's under another name, as large as `imported`'s: random
parameters of the shapes that the libraries' classes make (`spec_shapes.json`; by tests/dpiframe_core/importers/spec_shapes.py).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads.imported import FIELDS, NUMBERS, STEPS, TOKENS, drawn_parameter
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.importers.deepctr.checkpoint import read_deepctr
from dpiframe_core.importers.dlrm import read_torchrec
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, Spec, SpecFile
from dpiframe_core.importers.recbole.checkpoint import read_recbole
from dpiframe_core.importers.source_model import SourceModel
from dpiframe_core.importers.state_dict import StateDict

SHAPES = Path(__file__).with_name("spec_shapes.json")

# LIBRARY.MODEL -> what a spec has of its settings.
SPECS: Mapping[str, Mapping[str, Any]] = {
    "RecBole.AutoInt": {"num_heads": 2}, "RecBole.DCN": {}, "RecBole.DeepFM": {}, "RecBole.DIEN": {"gru_type": "AUGRU"},
    "RecBole.DIN": {}, "RecBole.FM": {}, "RecBole.NFM": {}, "RecBole.WideDeep": {}, "RecBole.xDeepFM": {"direct": False},
    "DeepCTR-Torch.DCNMix": {"task": "binary", "dnn_activation": "relu"}, "TorchRec.DLRM_DCN": {},
}  # fmt: skip
_READERS: Mapping[str, Callable[[SpecFile, StateDict], SourceModel]] = {
    "RecBole": read_recbole, "DeepCTR-Torch": read_deepctr, "TorchRec": read_torchrec,
}  # fmt: skip
ITEM, USER = ("item", "cate"), ("user", "age", "city")  # of RecBole's DIN and DIEN


def source_of(name: str, seed: int = 0) -> SourceModel:
    """One of `SPECS` as its importer makes it."""
    library, model = name.split(".")
    shapes, generator = json.loads(SHAPES.read_text())[name], torch.Generator().manual_seed(seed)
    weights = {n: drawn_parameter(n, shape, generator) for n, shape in shapes.items()}
    tokens = VocabularyTable.of({f"t{i}": i for i in range(1, TOKENS + 1)})
    features = tuple(_features(library, model))
    own = {f.name: tokens for f in features if isinstance(f, SparseFeature) and f.vocabulary}
    spec = SpecFile(name, Spec(model=model, features=features, settings=dict(SPECS[name])), own)
    return _READERS[library](spec, StateDict(weights, name))


def _features(library: str, model: str) -> list[SparseFeature | DenseFeature]:
    """Criteo's categories and numbers, or those of `imported`'s histories."""
    if library != "RecBole":
        ids = [SparseFeature(name=f"C{i}", missing_id=0, oov_id=0) for i in range(FIELDS)]
        return [*ids, *(DenseFeature(name=f"I{i}", missing_value=0.0) for i in range(NUMBERS))]
    if model in ("DIN", "DIEN"):
        steps = [SparseFeature(name=f"{name}_list", table=name, max_values=STEPS) for name in ITEM]
        return [*steps, *(_token(name) for name in (*ITEM, *USER))]
    return [*(_token(f"C{i}") for i in range(FIELDS)), *(DenseFeature(name=f"I{i}") for i in range(NUMBERS))]


def _token(name: str) -> SparseFeature:
    return SparseFeature(name=name, values="string", vocabulary=f"{name}.json")
